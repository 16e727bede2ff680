import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from specdec_ray.errors import InvalidParameter
from specdec_ray.sampling.edits import History, edit_
from specdec_ray.sampling.params import SamplingParams

VOCAB = 6
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
PARAMS = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB), st.sampled_from([-100.0, 1.5, 100.0])).map(
        lambda bias: tuple(bias.items())
    ),
    bad_words=st.lists(
        st.lists(st.integers(0, VOCAB), min_size=1, max_size=3).map(tuple), max_size=3
    ).map(tuple),
    min_tokens=st.integers(0, 5),
    end_token_ids=st.sets(st.integers(0, VOCAB), max_size=2).map(tuple),
)


def naive(logits, params, prompt, output):
    """One row's edited logits, token by token, as the parameters are documented."""
    row = logits.tolist()
    banned = set(params.end_token_ids) if len(output) < params.min_tokens else set()
    for word in params.bad_words:
        if (*output, word[-1])[-len(word) :] == word:
            banned.add(word[-1])
    kept = [value if token not in banned else -math.inf for token, value in enumerate(row)]
    row = kept if any(value > -math.inf for value in kept) else row
    for token, bias in params.logit_bias:
        if token < VOCAB:
            row[token] += bias
    for token, value in enumerate(row):
        if token in (*prompt, *output):
            scale = params.repetition_penalty
            row[token] = value / scale if value > 0 else value * scale
        times = output.count(token)
        row[token] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    return row


@settings(max_examples=300, deadline=None)
@given(PARAMS, TOKENS, TOKENS, st.lists(TOKENS, max_size=4))
def test_each_row_is_edited_by_its_own_history(params, prompt, output, paths):
    paths = [(), *map(tuple, paths)]
    logits = torch.randn(len(paths), VOCAB, generator=torch.Generator().manual_seed(len(prompt)))
    before = logits.clone()
    edit_(logits, params, History([*prompt, *output], len(prompt), paths))
    for row, path in enumerate(paths):
        expected = naive(before[row], params, prompt, [*output, *path])
        torch.testing.assert_close(logits[row], torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_repetition_penalty_is_transformers():
    context = [0, 3, 3, 5]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    stock = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([context]), logits.clone())
    edit_(logits, SamplingParams(repetition_penalty=1.7), History(context, 2, [()]))
    torch.testing.assert_close(logits, stock)


def test_a_ban_that_leaves_nothing_is_lifted_within_the_grammar():
    allowed = torch.tensor([[False, True, False, False, False, False]])
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(min_tokens=3, end_token_ids=(1,), logit_bias=((0, 100.0),))
    edit_(logits, params, History([2], 1, [()]), allowed)
    assert logits[0, 1] == 0
    assert logits.isneginf().sum() == VOCAB - 1


def test_long_bad_words_match_the_output_only():
    params = SamplingParams(bad_words=((1, 2, 3),))
    logits = torch.zeros(3, VOCAB)
    edit_(logits, params, History([1, 2], 1, [(), (3,), (1, 2)]))  # the 1 is the prompt's
    assert logits.isneginf().nonzero().tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", tuple((n, 1.0) for n in range(1025))),
        ("bad_words", ((),)),
        ("min_tokens", -1),
    ],
)
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(InvalidParameter, match=field):
        SamplingParams(**{field: value})
