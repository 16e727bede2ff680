import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_ray.sampling.logits import (
    NUCLEUS_CANDIDATES,
    TOP_K_CANDIDATES,
    WIDE_CANDIDATES,
    Distribution,
    RowParams,
    candidate_count,
    distribution,
)
from specdec_ray.sampling.params import SamplingParams

CPU = torch.device("cpu")
TINY = 1e-37  # below, float32 rounds a kept token's probability to zero now and then


def sparse(logits, params, candidates=None):
    return distribution(logits, RowParams.of(params, [0] * len(params), CPU), candidates)


def dense(logits, params, candidates=None):
    """Processed probabilities over the vocabulary, one set of parameters per row."""
    result = sparse(logits, params, candidates)
    return torch.zeros_like(logits).scatter(1, result.ids, result.probs)


def warped(logits, params):
    """transformers' own chain for one row, in float64."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits.double())
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores.softmax(-1)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 5),
    top_k=st.sampled_from([0, 1, 3, 10, 100]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 10_000), st.booleans())
def test_equals_the_warpers_of_transformers(params, seed, masked):
    logits = 3 * torch.randn(len(params), 40, generator=torch.Generator().manual_seed(seed))
    if masked:
        logits[:, ::3] = -torch.inf
    got = dense(logits, params)
    for row, own in enumerate(params):
        expected = warped(logits[row : row + 1], own)[0].float()
        torch.testing.assert_close(got[row], expected, rtol=1e-5, atol=1e-7)
        assert torch.equal(got[row] > TINY, expected > TINY)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PARAMS, st.lists(st.integers(-3, 3), min_size=40, max_size=40))
def test_tied_tokens_stay_or_go_together(own, values):
    """Equal logits have equal probabilities. transformers agrees about top-k and min-p; its top-p
    keeps as many of the tied ones as its sort happens to put first."""
    logits = torch.tensor([values], dtype=torch.float32)
    got = dense(logits, [own])[0]
    for value in set(values):
        assert len(set(got[logits[0] == value].tolist())) == 1
    expected = warped(logits, own)[0].float()
    if own.top_p == 1:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    else:
        assert bool((got[expected > TINY] > 0).all())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(PARAMS, st.integers(0, 10_000), st.sampled_from([8, 64, 300]))
def test_candidates_that_suffice_change_nothing(own, seed, candidates):
    """Looking at some ids only gives the whole vocabulary's law, or says that it did not."""
    logits = 4 * torch.randn(1, 400, generator=torch.Generator().manual_seed(seed))
    result = sparse(logits, [own], candidates)
    whole = dense(logits, [own])
    if bool(result.complete):
        got = torch.zeros_like(logits).scatter(1, result.ids, result.probs)
        torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-7)
        assert torch.equal(got > TINY, whole > TINY)
    else:
        assert own.top_k > candidates or int((whole > 0).sum()) >= candidates


def test_does_not_change_the_callers_logits():
    logits = torch.randn(2, 9)
    before = logits.clone()
    for own in (SamplingParams(top_p=0.5, top_k=3, min_p=0.2), SamplingParams(temperature=2)):
        for candidates in (None, 4):
            dense(logits, [own] * 2, candidates)
    assert torch.equal(logits, before)


def test_rows_keep_their_own_parameters_in_a_mixed_batch():
    logits = torch.randn(3, 30)
    params = [SamplingParams(top_k=2), SamplingParams(), SamplingParams(top_p=0.3)]
    together = dense(logits, params)
    for row, own in enumerate(params):
        torch.testing.assert_close(together[row], dense(logits[row : row + 1], [own])[0])


def test_masked_logits_have_probability_zero():
    logits = torch.tensor([[1.0, -torch.inf, 2.0]])
    for own in (SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.99)):
        assert dense(logits, [own])[0, 1] == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_sick_logits_make_their_own_row_nan_only(value):
    logits = torch.zeros(2, 5)
    logits[0, 1] = value
    for own in (SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.5)):
        got = dense(logits, [own] * 2)
        assert bool(got[0].isnan().any())
        assert not bool(got[1].isnan().any())


def test_a_tail_survives_a_top_p_of_one():
    """Sums that round to the whole mass drop nothing where nothing is to be dropped."""
    logits = torch.cat((torch.zeros(1), torch.full((99,), -30.0)))[None]
    assert int((dense(logits, [SamplingParams(top_k=100)]) > 0).sum()) == 100


def test_fewer_candidates_bound_the_support():
    got = dense(torch.arange(10.0)[None], [SamplingParams(top_k=3)], candidates=3)
    assert (got[0] > 0).nonzero().flatten().tolist() == [7, 8, 9]
    assert float(got.sum()) == pytest.approx(1)


def test_top_p_counts_against_the_whole_vocabulary():
    """p = .26 * .74**n: 90% of all takes eight tokens, 90% of what ten candidates hold only seven;
    99% takes more than they hold."""
    logits = -0.3 * torch.arange(100.0)[None]
    inside = sparse(logits, [SamplingParams(top_p=0.9)], candidates=10)
    assert inside.complete.tolist() == [True]
    assert int((inside.probs > 0).sum()) == 8
    beyond = sparse(logits, [SamplingParams(top_p=0.99)], candidates=10)
    assert beyond.complete.tolist() == [False]


def test_fewer_candidates_than_k_are_not_enough_for_a_top_p():
    own = SamplingParams(top_k=50, top_p=0.3)
    logits = torch.randn(1, 100)
    assert sparse(logits, [own], candidates=40).complete.tolist() == [False]


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({}, None),
        ({"temperature": 0.5}, None),
        ({"top_k": 1}, TOP_K_CANDIDATES),
        ({"top_k": 64, "top_p": 0.5}, TOP_K_CANDIDATES),
        ({"top_k": 65}, NUCLEUS_CANDIDATES),
        ({"top_k": 5000}, WIDE_CANDIDATES),
        ({"top_k": 20_000}, None),
        ({"top_p": 0.99}, NUCLEUS_CANDIDATES),
        ({"min_p": 0.1}, NUCLEUS_CANDIDATES),
    ],
)
def test_candidates_follow_from_the_request_alone(params, count):
    assert candidate_count(SamplingParams(**params)) == count


def test_find_gives_columns_of_ids():
    law = Distribution(torch.tensor([[7, 2, 5], [0, 9, 4]]), torch.rand(2, 3))
    columns, held = law.find(torch.tensor([[5, 6, -1], [0, 4, 100]]))
    assert held.tolist() == [[True, False, False], [True, True, False]]
    assert columns[0, 0] == 2
    assert columns[1, :2].tolist() == [0, 2]
    every = Distribution(torch.arange(4).expand(1, 4), torch.rand(1, 4), all_ids=True)
    columns, held = every.find(torch.tensor([[3, 4, -1]]))
    assert held.tolist() == [[True, False, False]]
    assert columns[0, 0] == 3
