"""Log-probabilities under speculation are the stock model's."""

import asyncio
import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_ray.engine import sessions
from specdec_ray.engine.loop import EngineThread
from specdec_ray.errors import InvalidParameter
from specdec_ray.rounds.in_process import InProcessPool
from specdec_ray.rounds.request import GenerationRequest
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.sampling.structure import regex
from specdec_ray.speculation.logprobs import LOWEST, emitted_logprobs
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.step import RowGroup, judge
from specdec_ray.speculation.tree import TokenTree

VOCAB = 259
PROMPT = list(b"The log of a")
EDITS = {
    "nothing": {},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": ((32, 5.0), (101, -100.0))},
    "filters": {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
    "grammar": {"grammar": regex("[a-z ]*")},
}


@pytest.fixture
def stock(make_llama):
    """log-softmax of the stock model at each of the tokens after the prompt, [tokens, V]."""

    @torch.inference_mode()
    def logprobs(tokens):
        logits = make_llama()(torch.tensor([PROMPT + tokens])).logits[0]
        return logits[len(PROMPT) - 1 : -1].log_softmax(-1)

    return logprobs


def flat(emissions):
    return [entry for emission in emissions for entry in emission.logprobs]


@pytest.mark.parametrize("edit", list(EDITS))
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("temperature", [0, 0.9])
async def test_they_are_the_stock_models(
    target_pool, draft_pool, play, stock, edit, rule, temperature
):
    """Raw: whatever the temperature, the edits and the filters."""
    params = SamplingParams(temperature=temperature, seed=2, logprobs=3, **EDITS[edit])
    for drafts in (None, draft_pool("near")):
        emissions, tokens = await play(PROMPT, target_pool, drafts, 30, params=params, rule=rule)
        expected, entries = stock(tokens), flat(emissions)
        assert len(entries) == len(tokens)
        for row, token, entry in zip(expected, tokens, entries, strict=True):
            values, ids = row.topk(3)
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
            assert {token for token, _ in entry.top} == set(ids.tolist())


@pytest.mark.parametrize("kind", ["none", "near"])
async def test_processed_ones_are_what_tokens_are_drawn_from(
    target_pool, draft_pool, play, make_llama, kind
):
    """As transformers' own processors and warpers make them of the stock model's logits."""
    params = SamplingParams(
        temperature=0.7,
        top_k=9,
        top_p=0.8,
        repetition_penalty=1.5,
        logit_bias=((32, 3.0),),
        seed=4,
        logprobs=4,
        processed_logprobs=True,
    )
    emissions, tokens = await play(PROMPT, target_pool, draft_pool(kind), 40, params=params)
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(32,): 3.0}),
            RepetitionPenaltyLogitsProcessor(1.5),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(9),
            TopPLogitsWarper(0.8),
        ]
    )
    with torch.inference_mode():
        raw = make_llama()(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 :]
    for at, (token, entry) in enumerate(zip(tokens, flat(emissions), strict=True)):
        row = processors(torch.tensor([PROMPT + tokens[:at]]), raw[at][None])[0].log_softmax(-1)
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        values = row.topk(4).values.clamp_min(LOWEST)
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


async def test_processed_ones_at_temperature_zero(target_pool, draft_pool, play, stock):
    bias = ((int(PROMPT[0]), 100.0),)
    params = SamplingParams(temperature=0, logit_bias=bias, logprobs=1, processed_logprobs=True)
    emissions, tokens = await play(PROMPT, target_pool, draft_pool("near"), 10, params=params)
    assert set(tokens) == {PROMPT[0]}
    assert [entry.logprob for entry in flat(emissions)] == pytest.approx([0.0] * 10, abs=1e-4)


async def test_who_asks_for_what_in_one_batch(target_pool, draft_pool, play, flaky, stock):
    drafts = draft_pool("near")
    asked = [None, 0, 2, 20]

    def one(count, targets=target_pool):
        params = SamplingParams(temperature=0, logprobs=count)
        return play(PROMPT, targets, drafts, 30, params=params)

    runs = await asyncio.gather(*(one(count) for count in asked), one(2, flaky(target_pool, 3)))
    for count, (emissions, tokens) in zip([*asked, 2], runs, strict=True):
        entries = flat(emissions)
        if count is None:
            assert not entries
            continue
        assert {len(entry.top) for entry in entries} == {count}
        own = stock(tokens).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert [entry.logprob for entry in entries] == pytest.approx(own.tolist(), abs=1e-4)


@pytest.mark.parametrize("rows", [1, 7, 64, 10**9])
async def test_of_the_prompt(make_llama, make_target, draft_pool, play, monkeypatch, rows):
    """In whatever chunks, beside sessions that ask for none, and once only after a loss."""
    monkeypatch.setattr(sessions, "MAX_SCORED_LOGITS", rows * VOCAB)
    targets = InProcessPool(EngineThread(make_target(make_llama()), "target"))
    drafts = draft_pool("near")
    torch.manual_seed(1)
    prompts = [torch.randint(0, 255, (size,)).tolist() for size in (1, 2, 63, 64, 65, 150)]
    asked = [0, None, 3, 20, 1, 5]

    def one(prompt, count):
        params = SamplingParams(temperature=0, prompt_logprobs=count, logprobs=0)
        return play(prompt, targets, drafts, 12, params=params)

    runs = await asyncio.gather(*map(one, prompts, asked))
    for prompt, count, (emissions, tokens) in zip(prompts, asked, runs, strict=True):
        with torch.inference_mode():
            logprobs = make_llama()(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        own = logprobs[:-1].gather(1, torch.tensor((prompt + tokens)[1:])[:, None])[:, 0].tolist()
        entries = emissions[0].prompt_logprobs
        expected = own[: len(prompt) - 1] if count is not None else []
        assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=1e-4)
        for row, entry in zip(logprobs, entries, strict=False):
            assert [value for _, value in entry.top] == pytest.approx(
                row.topk(count).values.tolist(), abs=1e-4
            )
        emitted = [entry.logprob for entry in flat(emissions)]
        assert emitted == pytest.approx(own[len(prompt) - 1 :], abs=1e-4)
        assert not any(emission.prompt_logprobs for emission in emissions[1:])


async def test_of_the_prompt_once_only(target_pool, draft_pool, play, flaky):
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    emissions, _ = await play(PROMPT, flaky(target_pool, 2), None, 20, params=params)
    assert [len(emission.prompt_logprobs) for emission in emissions][:2] == [len(PROMPT) - 1, 0]
    assert sum(len(emission.prompt_logprobs) for emission in emissions) == len(PROMPT) - 1


def test_of_a_prompt_too_long():
    params = SamplingParams(prompt_logprobs=20)
    with pytest.raises(InvalidParameter, match="prompt_logprobs: limit is 1048576 values"):
        GenerationRequest((0,) * 60_000, params, max_tokens=1)


def test_along_a_trees_path_over_real_ids_only():
    """Rows of rejected nodes and padding ids have no part in it."""
    torch.manual_seed(0)
    logits = torch.randn(5, 12)
    logits[:, 8:] = 50.0  # padding of the embedding
    logits[2, 7] = -math.inf
    best = logits[:, :8].argmax(-1).tolist()
    tree = TokenTree((9 % 8, best[0], best[2], 0), (-1, -1, 1, 1))
    logits[:, tree.tokens[0]] = -5.0
    best = logits[:, :8].argmax(-1).tolist()
    tree = TokenTree((tree.tokens[0], best[0], best[2], (best[2] + 1) % 8), (-1, -1, 1, 1))
    params = SamplingParams(temperature=0, logprobs=8)
    groups = [RowGroup(params, Rule.COUPLED, 4, tree)]
    judgements = judge(logits, groups, vocab_limit=8)
    assert judgements[0].path == (1, 2)
    (entries,) = emitted_logprobs(logits, groups, judgements, vocab_limit=8)
    rows = logits[[0, 2, 3], :8].log_softmax(-1)
    for row, token, entry in zip(rows, judgements[0].emitted, entries, strict=True):
        assert entry.logprob == pytest.approx(row[token].item())
        assert sorted(token for token, _ in entry.top) == list(range(8))
    assert entries[1].top[-1] == (7, LOWEST)
