"""Token trees through draft, rounds and target: the text is the one without them."""

import asyncio

import pytest

from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import Budget, DynamicShape, StaticShape

PROMPTS = [[5], [7, 8], list(b"It follows that"), list(b"x" * 90)]
SHAPES = {
    "branching": StaticShape.branching([3, 2, 1]),
    "uneven": StaticShape(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))),
    "dynamic": DynamicShape(width=3, depth=4, nodes=9),
}


@pytest.fixture(params=list(SHAPES))
def shape(request):
    return SHAPES[request.param]


@pytest.mark.parametrize("kind", ["same", "near", "other"])
@pytest.mark.parametrize("rule", list(Rule))
async def test_greedy_text_is_the_stock_models(
    target_pool, draft_pool, make_llama, greedy_reference, play, shape, kind, rule
):
    """Eight generations at once, trees of different sizes in one batch."""
    drafts = draft_pool(kind, shape)
    expected = [greedy_reference(make_llama(), prompt, 32) for prompt in PROMPTS]
    runs = [
        play(prompt, target_pool, drafts, 32, k=k, rule=rule) for k in (5, 9) for prompt in PROMPTS
    ]
    played = await asyncio.gather(*runs)
    assert [tokens for _, tokens in played] == 2 * expected
    if kind == "same" and isinstance(shape, StaticShape):
        depth = shape.within(Budget(9, 9)).depth
        assert all(e.accepted == depth for emissions, _ in played[4:] for e in emissions[1:-3])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, top_p=0.9, seed=11),
        SamplingParams(temperature=1.2, top_k=5, seed=3),
        SamplingParams(temperature=0.9, frequency_penalty=1.0, repetition_penalty=1.3, seed=4),
    ],
)
async def test_a_seed_names_one_text_whatever_the_tree(
    target_pool, draft_pool, play, shape, params
):
    _, expected = await play(PROMPTS[2], target_pool, None, 40, params=params)
    for kind in ("same", "near", "other"):
        drafts = draft_pool(kind, shape)
        runs = [play(PROMPTS[2], target_pool, drafts, 40, k=k, params=params) for k in (2, 9)]
        for emissions, tokens in await asyncio.gather(*runs):
            assert tokens == expected
            if kind == "same":
                hits = [e.accepted > 0 for e in emissions if e.proposed]
                assert sum(hits) > 0.6 * len(hits)  # a draft knows the 64 likeliest


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.TYPICAL, Rule.BLOCK])
async def test_other_rules_take_trees_or_chains(target_pool, draft_pool, play, shape, rule):
    params = SamplingParams(temperature=0.8, seed=2)
    emissions, tokens = await play(
        PROMPTS[2], target_pool, draft_pool("same", shape), 40, k=9, params=params, rule=rule
    )
    assert len(tokens) == 40
    assert any(e.accepted for e in emissions)


async def test_a_tree_wider_than_the_text_left(
    target_pool, draft_pool, play, greedy_reference, make_llama
):
    """Its nodes are more than the tokens that may still come; the cache has room for them."""
    shape = StaticShape.branching([8])
    expected = greedy_reference(make_llama(), PROMPTS[0], 6)
    for count in range(1, 7):
        emissions, tokens = await play(
            PROMPTS[0], target_pool, draft_pool("near", shape), count, k=9
        )
        assert tokens == expected[:count]
        assert all(e.proposed == 8 for e in emissions[1:-1])
