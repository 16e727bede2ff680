"""Proposers without a model."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_ray.config import Method
from specdec_ray.engine.messages import Open, Propose, RefusalCode, Refused
from specdec_ray.rounds.lookup import LookupPool, LookupSession, Memory, NGramIndex, lookup_pool
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import Budget

PROMPT = list(b"one two three, one two three, one")
GREEDY = SamplingParams(temperature=0)


def opened(tokens, memory=None, prompt_length=0):
    session = LookupSession(memory)
    return session, session._answer(
        Open(session.session_id, tuple(tokens), GREEDY, Rule.COUPLED, 99, prompt_length)
    )


def proposed(session, handle, tokens, count):
    reply = session._answer(Propose(handle, tuple(tokens), Budget(count, count)))
    assert reply.tree.is_chain
    assert reply.draft_probs is None
    assert reply.base_length == reply.handle.length == handle.length + len(tokens)
    return list(reply.tree.tokens), reply.handle


def test_proposes_what_followed_the_longest_match():
    session, reply = opened([1, 2, 3, 4, 9, 2, 3, 5, 7, 1, 2])
    drafted, handle = proposed(session, reply.handle, [3], 2)
    assert drafted == [4, 9]  # (1, 2, 3) matches longer than the later (2, 3)
    drafted, _ = proposed(session, handle, [8, 9, 2, 3], 3)
    assert drafted == [5, 7, 1]  # (9, 2, 3)


def test_of_equal_matches_the_latest_counts():
    session, reply = opened([1, 2, 5, 1, 2, 6, 1, 2])
    assert proposed(session, reply.handle, [], 1)[0] == [6]


def test_a_repetition_goes_on_past_the_end():
    session, reply = opened([7, 1, 2, 3, 1, 2, 3, 1, 2])
    assert proposed(session, reply.handle, [], 7)[0] == [3, 1, 2, 3, 1, 2, 3]


def test_proposes_nothing_without_a_match():
    for tokens in ([1], [1, 2], [1, 2, 3, 4], [5, 5]):
        session, reply = opened(tokens)
        assert proposed(session, reply.handle, [], 4)[0] == []


def test_other_tokens_are_refused_with_the_known_length():
    session, reply = opened([1, 2, 3])
    proposed(session, reply.handle, [4], 2)
    refused = session._answer(Propose(reply.handle, (9,), Budget(2, 2)))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.known_length) == (RefusalCode.STALE_LENGTH, 4)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6))
def test_the_index_finds_what_a_search_finds(tokens, chunk):
    index, known = NGramIndex(), []
    for start in range(0, len(tokens), chunk):
        known += tokens[start : start + chunk]
        index.add(known, start)
    lengths = [
        next(n for n in range(end + 1) if n == end or known[end - 1 - n] != known[-1 - n])
        for end in range(2, len(known))
    ]
    longest = max((n for n in lengths if n >= 2), default=0)
    match = index.longest_match(known)
    assert match.length == min(longest, 32)
    if match.length:
        ends = [end for end, n in enumerate(lengths, 2) if n == longest]
        assert match.end in ends
        assert match.sequence is known


async def test_suffixes_remember_outputs_and_no_prompts():
    pool = LookupPool(Memory())
    async with pool.session() as session:
        await session.call(
            Open(session.session_id, (50, 51, 52, 53, 1, 2), GREEDY, Rule.COUPLED, 99, 6)
        )
        handle = session._handle()
        await session.call(Propose(handle, (3, 4, 5), Budget(1, 1)))
    async with pool.session() as session:
        reply = await session.call(Open(session.session_id, (9, 1, 2), GREEDY, Rule.COUPLED, 99, 3))
        drafted, handle = proposed(session, reply.handle, [], 4)
        assert drafted == [3, 4, 5]
        assert proposed(session, handle, [50, 51], 4)[0] == []


def test_memory_is_bounded_and_forgets_the_oldest():
    memory = Memory(tokens=100)
    for at in range(100):
        memory.add([1000 * at + i for i in range(20)])
    sizes = memory._newer.size, memory._older.size
    assert max(sizes) <= 118
    assert memory.longest_match([99_003, 99_004]).length == 2
    assert memory.longest_match([3, 4]).length == 0


@pytest.mark.parametrize("method", [Method.PROMPT_LOOKUP, Method.SUFFIX])
@pytest.mark.parametrize("rule", [rule for rule in Rule if rule.lossless])
async def test_greedy_text_is_the_targets(target_pool, play, method, rule):
    _, plain = await play(PROMPT, target_pool, None, 60)
    pool = lookup_pool(method)
    runs = [play(PROMPT, target_pool, pool, 60, k=k, rule=rule) for k in (1, 4, 8)]
    for _, tokens in await asyncio.gather(*runs):
        assert tokens == plain
    emissions, tokens = await play(PROMPT, target_pool, pool, 60, rule=rule)
    assert tokens == plain
    if method is Method.SUFFIX:
        assert len(emissions) < 20, "the runs before are looked up"


async def test_repetitive_text_is_accepted(target_pool, play):
    """A penalty below 1 makes the target repeat itself, as copied text does."""
    params = SamplingParams(temperature=0, repetition_penalty=0.5)
    _, plain = await play(PROMPT, target_pool, None, 60, params=params)
    emissions, tokens = await play(
        PROMPT, target_pool, lookup_pool(Method.PROMPT_LOOKUP), 60, k=8, params=params
    )
    assert tokens == plain
    assert len(emissions) < 30


@pytest.mark.parametrize("method", [Method.PROMPT_LOOKUP, Method.SUFFIX])
async def test_seeded_text_is_that_of_every_proposer(target_pool, draft_pool, flaky, play, method):
    params = SamplingParams(temperature=0.6, top_p=0.9, frequency_penalty=0.1, seed=11)
    _, plain = await play(PROMPT, target_pool, None, 60, params=params)
    _, drafted = await play(PROMPT, target_pool, draft_pool("near"), 60, params=params)
    pool = lookup_pool(method)
    for _ in range(2):  # the second time, suffixes know it all
        emissions, tokens = await play(PROMPT, target_pool, pool, 60, params=params)
        assert tokens == drafted == plain
    if method is Method.SUFFIX:
        assert sum(e.accepted for e in emissions) > 40
    _, tokens = await play(PROMPT, flaky(target_pool, 3), pool, 60, params=params)
    assert tokens == plain


def test_nothing_to_look_up():
    assert lookup_pool(Method.NONE) is lookup_pool(Method.DRAFT_MODEL) is None
