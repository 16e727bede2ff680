import asyncio
from contextlib import aclosing

import pytest

from specdec_ray.engine.loop import EngineThread
from specdec_ray.errors import EngineLost
from specdec_ray.rounds.generate import generate
from specdec_ray.rounds.in_process import InProcessPool
from specdec_ray.rounds.request import GenerationRequest, RoundSettings
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule

PROMPTS = [[5], [7, 8], [1, 2, 3], list(b"It follows that"), list(b"x" * 90)]
DRAFTS = ["none", "same", "near", "other"]


@pytest.fixture
def references(make_llama, greedy_reference):
    return [greedy_reference(make_llama(), prompt, 48) for prompt in PROMPTS]


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rule", list(Rule))
async def test_greedy_text_is_the_stock_models(
    target_pool, draft_pool, play, references, draft, k, rule
):
    drafts = draft_pool(draft)
    for prompt, reference in zip(PROMPTS, references, strict=True):
        _, tokens = await play(prompt, target_pool, drafts, 48, k=k, rule=rule)
        assert tokens == reference
    together = await asyncio.gather(
        *(play(p, target_pool, drafts, 48, k=k, rule=rule) for p in PROMPTS)
    )
    assert [tokens for _, tokens in together] == references


async def test_a_seed_names_one_text_whatever_drafts_it(target_pool, draft_pool, play):
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
    _, expected = await play(PROMPTS[3], target_pool, None, 40, params=params)
    for draft in DRAFTS[1:]:
        drafts = draft_pool(draft)
        for k in (1, 4, 8):
            run = [play(PROMPTS[3], target_pool, drafts, 40, k=k, params=params) for _ in range(8)]
            for _, tokens in await asyncio.gather(*run):
                assert tokens == expected
    other = await play(PROMPTS[3], target_pool, None, 40, params=SamplingParams(seed=12))
    assert other[1] != expected


@pytest.mark.parametrize("count", [1, 2, 3, 7])
async def test_never_more_than_asked(target_pool, draft_pool, play, references, count):
    for k in (1, 8):
        emissions, tokens = await play(PROMPTS[3], target_pool, draft_pool("same"), count, k=k)
        assert tokens == references[3][:count]
        assert all(e.proposed <= max(0, count - 2) for e in emissions)


async def test_k_reaches_the_rounds(target_pool, draft_pool, play):
    emissions, _ = await play(PROMPTS[3], target_pool, draft_pool("same"), 49, k=3)
    assert [(e.proposed, e.accepted) for e in emissions] == [(0, 0), *[(3, 3)] * 12]


@pytest.mark.parametrize("offset", range(5))
async def test_a_rejection_at_any_offset(target_pool, scripted, play, references, offset):
    reference = references[3]

    def script(committed, count):
        done = len(committed) - len(PROMPTS[3])
        drafted = reference[done : done + count]
        return [t if i < offset else (t + 1) % 250 for i, t in enumerate(drafted)]

    emissions, tokens = await play(PROMPTS[3], target_pool, scripted(script), 48, k=4)
    assert tokens == reference
    assert all(e.accepted == min(offset, e.proposed) for e in emissions)


async def test_empty_and_random_proposals_are_legal(target_pool, scripted, play, references):
    drafts = scripted(lambda committed, count: [3] * (len(committed) % (count + 1)))
    _, tokens = await play(PROMPTS[3], target_pool, drafts, 48)
    assert tokens == references[3]
    assert drafts.open_sessions == 0


async def test_a_lost_draft_costs_speed_only(target_pool, scripted, play, references):
    calls = []

    def script(committed, count):
        calls.append(count)
        return EngineLost("killed") if len(calls) == 3 else [1]

    drafts = scripted(script)
    _, tokens = await play(PROMPTS[3], target_pool, drafts, 48)
    assert tokens == references[3]
    assert len(calls) == 3
    assert drafts.open_sessions == 0


async def test_a_draft_that_breaks_in_any_way_costs_speed_only(target_pool, play, references):
    class BrokenPool:
        def session(self):
            raise RuntimeError("a bug of ours or of Serve's")

    _, tokens = await play(PROMPTS[3], target_pool, BrokenPool(), 48)
    assert tokens == references[3]


async def test_a_silent_draft_is_bypassed_then_given_up(target_pool, scripted, references):
    calls = []

    def script(committed, count):
        calls.append(count)
        return asyncio.Event().wait()

    request = GenerationRequest(tuple(PROMPTS[3]), SamplingParams(temperature=0), 48)
    request = GenerationRequest(request.prompt, request.params, 48, rule=Rule.COUPLED)
    settings = RoundSettings(Rule.COUPLED, 4, draft_timeout_s=0.05)
    rounds = generate(request, target_pool, scripted(script), settings)
    tokens = [token async for e in rounds for token in e.tokens]
    assert tokens == references[3]
    assert len(calls) == 2


@pytest.mark.parametrize("calls", [1, 2, 5])
async def test_a_lost_target_loses_no_token(
    target_pool, draft_pool, flaky, play, references, calls
):
    targets = flaky(target_pool, calls)
    _, tokens = await play(PROMPTS[3], targets, draft_pool("near"), 48)
    assert tokens == references[3]
    assert targets.sessions > 1


async def test_sampled_text_survives_a_lost_target(target_pool, draft_pool, flaky, play):
    params = SamplingParams(seed=4)
    _, expected = await play(PROMPTS[3], target_pool, None, 40, params=params)
    _, tokens = await play(PROMPTS[3], flaky(target_pool, 3), draft_pool("near"), 40, params=params)
    assert tokens == expected


async def test_targets_that_stay_lost_end_the_generation(target_pool, flaky, play):
    with pytest.raises(EngineLost):
        await play(PROMPTS[3], flaky(target_pool, 0), None, 8)


async def test_leaving_frees_both_sides_at_once(target_pool, make_llama, make_draft):
    engine = EngineThread(make_draft(make_llama()), "draft")
    request = GenerationRequest((1, 2), SamplingParams(temperature=0), 400, rule=Rule.COUPLED)
    settings = RoundSettings(Rule.COUPLED, 4, 5)
    async with aclosing(generate(request, target_pool, InProcessPool(engine), settings)) as rounds:
        async for emission in rounds:
            if emission.proposed:
                break
        assert engine.session_count == 1
    await asyncio.sleep(0.1)
    assert engine.session_count == 0


async def test_a_draft_with_a_shorter_context_gives_way(target_pool, make_llama, make_draft, play):
    tiny = InProcessPool(EngineThread(make_draft(make_llama(), blocks=2), "tiny"))
    emissions, tokens = await play([1, 2, 3], target_pool, tiny, 60)
    _, expected = await play([1, 2, 3], target_pool, None, 60)
    assert tokens == expected
    assert emissions[1].accepted == 4
    assert emissions[-1].proposed == 0
    _, tokens = await play([1] * 33, target_pool, tiny, 10)
    assert len(tokens) == 10


async def test_a_storm_of_cancellations_leaks_nothing(target_pool, draft_pool, play):
    drafts = draft_pool("near")
    tasks = [
        asyncio.create_task(play([n + 1] * (1 + n % 30), target_pool, drafts, 60))
        for n in range(60)
    ]
    for n, task in enumerate(tasks):
        await asyncio.sleep(0.005)
        if n % 2:
            tasks[n // 2].cancel()
        del task
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, (tuple, asyncio.CancelledError)) for r in results)


async def test_the_draft_works_on_the_next_round_before_the_last_ones_text_is_taken(
    target_pool, scripted
):
    asked = []

    def script(committed, count):
        asked.append(len(committed))
        return [1]

    request = GenerationRequest((1, 2), SamplingParams(temperature=0), 20, rule=Rule.COUPLED)
    settings = RoundSettings(Rule.COUPLED, 4, draft_timeout_s=5)
    committed = 2
    async with aclosing(generate(request, target_pool, scripted(script), settings)) as rounds:
        async for emission in rounds:
            committed += len(emission.tokens)
            if emission.proposed and committed < 20:
                assert asked[-1] == committed
