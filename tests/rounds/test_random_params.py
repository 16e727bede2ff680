"""Any combination of sampling parameters: text with speculation equals text without."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_ray.sampling.params import SamplingParams
from specdec_ray.sampling.structure import regex

PROMPT = list(b"It follows that it follows")
COUNT = 24
GRAMMARS = ["", regex("[a-f ]+")]
TOKEN = st.integers(0, 258)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 3),
    presence_penalty=st.sampled_from([0.0, 1.0, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(TOKEN, st.sampled_from([-100.0, -3.0, 4.0]), max_size=8).map(
        lambda bias: tuple(bias.items())
    ),
    bad_words=st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    min_tokens=st.integers(0, COUNT),
    end_token_ids=st.sets(TOKEN, max_size=3).map(tuple),
    grammar=st.sampled_from(GRAMMARS),
)


@pytest.fixture(params=["near", "other"])
def drafts(request, draft_pool):
    return draft_pool(request.param)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(params=PARAMS, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3))
async def test_speculation_changes_no_token(target_pool, drafts, play, params, lengths):
    _, plain = await play(PROMPT, target_pool, None, COUNT, params=params)
    runs = [play(PROMPT, target_pool, drafts, COUNT, k=k, params=params) for k in lengths]
    for _, tokens in await asyncio.gather(*runs):
        assert tokens == plain
