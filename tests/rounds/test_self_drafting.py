"""Targets that draft by themselves: Medusa heads and early exit give the text without them."""

import asyncio

import pytest
import torch

from specdec_ray.engine.loop import EngineThread
from specdec_ray.engine.proposer import EarlyExitProposer, MedusaProposer
from specdec_ray.models.medusa import MedusaHeads
from specdec_ray.models.split import SplitModel
from specdec_ray.rounds.generate import generate
from specdec_ray.rounds.in_process import InProcessPool
from specdec_ray.rounds.request import GenerationRequest, RoundSettings
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import DynamicShape, StaticShape

VOCAB = 259
PROMPTS = [[5], [7, 8], list(b"It follows that"), list(b"x" * 90)]
GREEDY = SamplingParams(temperature=0)
SHAPES = {
    "chain": StaticShape.chain(3),
    "branching": StaticShape.branching([3, 2, 1]),
    "dynamic": DynamicShape(width=3, depth=3, nodes=9),
}
PROPOSERS = [("medusa", name) for name in SHAPES] + [
    ("early_exit", name) for name in ("chain", "branching")
]


def medusa(packed, shape):
    torch.manual_seed(1)
    heads = MedusaHeads(3, 1, 64, VOCAB)
    output = packed.model.get_output_embeddings().weight
    for head in heads:  # what a head predicts is not far from what the model does
        head[-1].weight.data = output.data.clone()
    return MedusaProposer(packed, heads.eval(), shape, VOCAB)


def early_exit(packed, shape, layer=3):
    return EarlyExitProposer(SplitModel(packed, layer), shape, VOCAB)


@pytest.fixture
def model(make_llama):
    """Four layers, the last of which changes little, so that an exit before it is often right."""
    model = make_llama(layers=4)
    with torch.no_grad():
        last = model.model.layers[3]
        last.self_attn.o_proj.weight.mul_(0.3)
        last.mlp.down_proj.weight.mul_(0.3)
    return model


@pytest.fixture
def make_pool(make_target, model):
    def make(kind, shape):
        engine = make_target(model)
        if kind != "none":
            engine._proposer = {"medusa": medusa, "early_exit": early_exit}[kind](
                engine._model, SHAPES[shape]
            )
        return InProcessPool(EngineThread(engine, kind))

    return make


async def play(pool, prompt, count, *, k=9, params=GREEDY, rule=Rule.COUPLED):
    request = GenerationRequest(tuple(prompt), params, count, draft_tokens=k, rule=rule)
    settings = RoundSettings(rule, k, draft_timeout_s=5, self_drafting=True)
    emissions = [e async for e in generate(request, pool, None, settings)]
    return emissions, [token for e in emissions for token in e.tokens]


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize(("kind", "shape"), PROPOSERS)
async def test_greedy_text_is_the_stock_models(
    make_pool, model, greedy_reference, kind, shape, rule
):
    """Twelve generations at once, one budget in three of them zero."""
    expected = [greedy_reference(model, prompt, 32) for prompt in PROMPTS]
    pool = make_pool(kind, shape)
    runs = [play(pool, prompt, 32, k=k, rule=rule) for k in (0, 5, 9) for prompt in PROMPTS]
    played = await asyncio.gather(*runs)
    assert [tokens for _, tokens in played] == 3 * expected
    assert not any(e.proposed for emissions, _ in played[:4] for e in emissions)
    assert sum(e.accepted for emissions, _ in played[4:] for e in emissions) > 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, top_p=0.9, seed=11),
        SamplingParams(temperature=0.9, frequency_penalty=1.0, repetition_penalty=1.3, seed=4),
        SamplingParams(temperature=0.8, seed=5, prompt_logprobs=2, logprobs=1),
    ],
)
async def test_a_seed_names_one_text_whoever_drafts(make_pool, params):
    async def texts(pool, k):
        runs = [play(pool, prompt, 40, k=k, params=params) for prompt in PROMPTS]
        return [tokens for _, tokens in await asyncio.gather(*runs)]

    expected = await texts(make_pool("none", "chain"), 0)
    for kind, shape in PROPOSERS:
        assert await texts(make_pool(kind, shape), 9) == expected


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.TYPICAL, Rule.BLOCK])
@pytest.mark.parametrize(("kind", "shape"), PROPOSERS)
async def test_other_rules_take_its_trees(make_pool, kind, shape, rule):
    params = SamplingParams(temperature=0.8, seed=2)
    emissions, tokens = await play(make_pool(kind, shape), PROMPTS[2], 40, params=params, rule=rule)
    assert len(tokens) == 40
    assert all(e.proposed for e in emissions[1:-1])
    # Heads that were never trained are no match for a flat law.
    assert kind == "medusa" or any(e.accepted for e in emissions)


@pytest.mark.parametrize("shape", ["chain", "branching"])
async def test_no_row_passes_a_layer_twice(make_pool, model, shape):
    """First layers see every verified row once, however many levels the tree has."""
    rows = [0] * 4
    hooks = [
        layer.register_forward_hook(
            lambda _, inputs, __, at=at: rows.__setitem__(at, rows[at] + inputs[0].shape[1])
        )
        for at, layer in enumerate(model.model.layers)
    ]
    pool = make_pool("early_exit", shape)
    rows[:] = [0] * 4
    emissions, _ = await play(pool, PROMPTS[2], 30)
    for hook in hooks:
        hook.remove()
    verified = len(PROMPTS[2]) + sum(1 + e.proposed for e in emissions[1:])
    assert rows == [verified] * 4


async def test_a_target_without_a_proposer_says_so(make_pool):
    with pytest.raises(Exception, match="does not draft by itself"):
        await play(make_pool("none", "chain"), PROMPTS[0], 8)
