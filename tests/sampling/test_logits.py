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

from specdec_ray.sampling.logits import RowParams, distribution
from specdec_ray.sampling.params import SamplingParams

CPU = torch.device("cpu")


def dense(logits, params, support=None):
    """Processed probabilities over the vocabulary, one set of parameters per row."""
    rows = RowParams.of(params, [0] * len(params), CPU)
    sparse = distribution(logits, rows, support)
    return torch.zeros_like(logits).scatter(1, sparse.ids, sparse.probs)


def warped(logits, params):
    """transformers' own chain for one row."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
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
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.9),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 10_000))
def test_equals_the_warpers_of_transformers(params, seed):
    logits = 3 * torch.randn(len(params), 40, generator=torch.Generator().manual_seed(seed))
    got = dense(logits, params)
    for row, own in enumerate(params):
        expected = warped(logits[row : row + 1], own)[0]
        if ((got[row] > 0) != (expected > 0)).any():  # a cumulative sum fell on top_p exactly
            edge = (got[row] > 0) ^ (expected > 0)
            assert int(edge.sum()) == 1
            continue
        torch.testing.assert_close(got[row], expected, rtol=1e-5, atol=1e-7)


def test_does_not_change_the_callers_logits():
    logits = torch.randn(2, 9)
    before = logits.clone()
    dense(logits, [SamplingParams(top_p=0.5, top_k=3, min_p=0.2)] * 2)
    assert torch.equal(logits, before)


def test_rows_keep_their_own_parameters_in_a_mixed_batch():
    logits = torch.randn(3, 30)
    params = [SamplingParams(top_k=2), SamplingParams(), SamplingParams(top_p=0.3)]
    together = dense(logits, params)
    for row, own in enumerate(params):
        torch.testing.assert_close(together[row], dense(logits[row : row + 1], [own])[0])


def test_masked_logits_have_probability_zero():
    logits = torch.tensor([[1.0, -torch.inf, 2.0]])
    assert dense(logits, [SamplingParams()])[0, 1] == 0


def test_support_bounds_a_full_row():
    logits = torch.arange(10.0)[None]
    got = dense(logits, [SamplingParams()], support=3)
    assert (got[0] > 0).nonzero().flatten().tolist() == [7, 8, 9]
    assert float(got.sum()) == pytest.approx(1)
