"""Structured output under speculation: text with speculation equals text without."""

import asyncio
import json

import pytest

from specdec_ray.sampling.params import SamplingParams
from specdec_ray.sampling.structure import json_schema, regex
from specdec_ray.speculation.proposal import Rule

PROMPT = list(b"As JSON: ")
EOS = 257
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["tree", "chain"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
GRAMMARS = {"schema": json_schema(SCHEMA), "regex": regex(r"[a-z ]{20,24}(end|stop)\.")}


@pytest.mark.parametrize("grammar", list(GRAMMARS))
@pytest.mark.parametrize("temperature", [0, 0.9])
async def test_speculation_changes_no_token(
    target_pool, draft_pool, flaky, play, grammar, temperature
):
    params = SamplingParams(temperature=temperature, seed=5, grammar=GRAMMARS[grammar])
    _, plain = await play(PROMPT, target_pool, None, 48, params=params)
    for draft, k in (("near", 1), ("near", 6), ("other", 4)):
        drafts = draft_pool(draft)
        runs = [play(PROMPT, target_pool, drafts, 48, k=k, params=params) for _ in range(3)]
        for _, tokens in await asyncio.gather(*runs):
            assert tokens == plain
    _, tokens = await play(PROMPT, flaky(target_pool, 3), draft_pool("near"), 48, params=params)
    assert tokens == plain, "the state is rebuilt where a target was lost"


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule.lossless])
async def test_the_draft_follows_the_grammar_too(target_pool, draft_pool, play, rule):
    """Acceptance stays high: a draft with the target's weights is always right."""
    params = SamplingParams(temperature=0.9, top_k=20, seed=3, grammar=GRAMMARS["regex"])
    emissions, _ = await play(PROMPT, target_pool, draft_pool("same"), 24, params=params, rule=rule)
    assert sum(e.accepted for e in emissions) == sum(e.proposed for e in emissions) > 0


@pytest.mark.parametrize("rule", list(Rule))
async def test_every_text_is_what_the_schema_says(target_pool, draft_pool, play, tokenizer, rule):
    drafts = draft_pool("other")
    # Random weights like long numbers and blanks; penalties end them.
    for seed in range(4):
        params = SamplingParams(
            temperature=1.5, seed=seed, frequency_penalty=1.0, grammar=GRAMMARS["schema"]
        )
        _, tokens = await play(PROMPT, target_pool, drafts, 400, k=5, params=params, rule=rule)
        assert EOS in tokens
        value = json.loads(tokenizer.decode(tokens[: tokens.index(EOS)]))
        assert len(value["name"]) <= 8
        assert value["kind"] in ("tree", "chain")
        assert set(value) <= {"name", "kind", "sizes"}
