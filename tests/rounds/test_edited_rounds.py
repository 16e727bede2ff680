"""Parameters that edit logits: text with speculation equals text without."""

import asyncio
from dataclasses import replace

import pytest
import torch

from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule

PROMPT = list(b"It follows that it follows")
EDITS = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": ((32, 3.0), (101, -100.0))},
    "bad words": {"bad_words": ((32,), (116, 104))},
    "min tokens": {"min_tokens": 30, "end_token_ids": (32, 257, 10)},
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": ((32, 2.0),),
        "bad_words": ((97, 98), (99,)),
        "min_tokens": 5,
        "end_token_ids": (257,),
        "top_p": 0.9,
    },
}


@pytest.mark.parametrize("name", list(EDITS))
@pytest.mark.parametrize("temperature", [0, 0.9])
async def test_speculation_changes_no_token(
    target_pool, draft_pool, flaky, play, name, temperature
):
    unedited = SamplingParams(temperature=temperature, seed=5)
    _, without = await play(PROMPT, target_pool, None, 40, params=unedited)
    edits = dict(EDITS[name])
    if "bad_words" in edits:
        edits["bad_words"] = ((without[1],), tuple(without[4:6]))
    params = replace(unedited, **edits)
    _, plain = await play(PROMPT, target_pool, None, 40, params=params)
    if name != "min tokens":
        assert plain != without
    for draft, k in (("near", 1), ("near", 6), ("other", 4)):
        drafts = draft_pool(draft)
        runs = [play(PROMPT, target_pool, drafts, 40, k=k, params=params) for _ in range(3)]
        for _, tokens in await asyncio.gather(*runs):
            assert tokens == plain
    _, tokens = await play(PROMPT, flaky(target_pool, 3), draft_pool("near"), 40, params=params)
    assert tokens == plain  # the prompt's length survives a target's loss


@pytest.mark.parametrize("name", ["frequency", "bias", "bad words", "all"])
async def test_the_draft_edits_as_the_target_does(target_pool, draft_pool, play, name):
    """Acceptance stays high: a draft with the target's weights is always right."""
    for rule in (rule for rule in Rule if rule.lossless):
        params = SamplingParams(temperature=0.9, top_k=20, seed=3, **EDITS[name])
        params = replace(params, top_p=1.0)
        emissions, _ = await play(
            PROMPT, target_pool, draft_pool("same"), 40, params=params, rule=rule
        )
        assert sum(e.accepted for e in emissions) == sum(e.proposed for e in emissions)


async def test_the_repetition_penalty_is_transformers(target_pool, draft_pool, play, make_llama):
    ids = torch.tensor([PROMPT])
    stock = (
        make_llama()
        .generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            repetition_penalty=1.3,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(PROMPT) :]
        .tolist()
    )
    params = SamplingParams(temperature=0, repetition_penalty=1.3)
    _, tokens = await play(PROMPT, target_pool, draft_pool("near"), 40, params=params)
    assert tokens == stock
