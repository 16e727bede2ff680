import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from specdec_ray import SpeculativeDecoder
from specdec_ray.config import Method
from specdec_ray.errors import ConfigError, ContextOverflow, InvalidParameter
from specdec_ray.sampling.logits import RowParams, distribution
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.sampling.structure import choice
from specdec_ray.speculation.proposal import Rule


@pytest.fixture(scope="module")
def folders(make_llama, tokenizer, tmp_path_factory):
    """A target and two drafts on disk."""
    root = tmp_path_factory.mktemp("models")
    models = {"target": {}, "near": {"noise": 0.05}, "other": {"seed": 3}}
    for name, options in models.items():
        make_llama(**options).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: str(root / name) for name in models}


@pytest.fixture
def decoder(folders):
    with SpeculativeDecoder.from_pretrained(
        folders["target"], folders["near"], dtype="float32", kv_cache_tokens=4096
    ) as decoder:
        yield decoder


def test_greedy_text_of_one_prompt(decoder, make_llama, greedy_reference, tokenizer):
    generation = decoder.generate("A prompt.", max_tokens=40, ignore_eos=True)
    reference = greedy_reference(make_llama(), tokenizer("A prompt.")["input_ids"], 40)
    assert list(generation.token_ids) == reference
    assert generation.text == tokenizer.decode(reference, skip_special_tokens=True)
    assert generation.finish_reason == "length"
    assert sum(generation.stats.per_round_proposed) > 0


def test_a_batch_of_unlike_prompts_equals_each_alone(decoder):
    prompts = ["x" * n for n in (1, 2, 30, 200)]
    options = {"max_tokens": 25, "temperature": 0.9, "seed": 5}
    together = decoder.generate(prompts, **options)
    alone = [decoder.generate(prompt, **options) for prompt in prompts]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]


def test_a_fresh_seed_is_returned_and_names_the_text(decoder):
    first, second = (decoder.generate("s", temperature=1, max_tokens=12) for _ in range(2))
    assert first.seed != second.seed
    again = decoder.generate("s", temperature=1, max_tokens=12, seed=first.seed)
    assert again.token_ids == first.token_ids


def test_stream_gives_the_same_text(decoder):
    deltas = list(decoder.stream("stream me", max_tokens=20))
    whole = decoder.generate("stream me", max_tokens=20)
    assert "".join(d.text for d in deltas) == whole.text
    assert len(deltas) > 1


def test_structured_output(decoder):
    generation = decoder.generate("x", grammar=choice(["cat", "cow"]), temperature=1.0)
    assert generation.text in ("cat", "cow")
    with pytest.raises(InvalidParameter, match="grammar: limit is"):
        decoder.generate("x", grammar="x" * 70_000)


def test_a_stream_left_early_frees_its_sessions(decoder):
    stream = decoder.stream("stream me", max_tokens=200)
    next(stream)
    stream.close()


def test_bad_input_is_named(decoder):
    with pytest.raises(InvalidParameter, match="prompt"):
        decoder.generate("")
    with pytest.raises(ContextOverflow, match="512"):
        decoder.generate("x" * 500, max_tokens=20)
    with pytest.raises(InvalidParameter, match="top_p"):
        decoder.generate("x", top_p=0)


def test_context_limit_is_reached_exactly(decoder):
    assert len(decoder.generate("x" * 500, max_tokens=12, ignore_eos=True).token_ids) == 12


def test_a_draft_may_know_more_ids(folders, tokenizer, make_llama, tmp_path):
    make_llama(vocab=261).save_pretrained(tmp_path)
    other = tokenizer.__class__.from_pretrained(folders["target"])
    other.add_tokens(["<new>"])
    other.save_pretrained(tmp_path)
    with SpeculativeDecoder.from_pretrained(folders["target"], str(tmp_path), dtype="float32") as d:
        assert d.generate("longer vocabularies are fine", max_tokens=5).token_ids


TINY = 5
LAWS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 3},
]


@pytest.fixture(scope="module")
def tiny_pair(make_llama, tokenizer, tmp_path_factory):
    """Models with a padded embedding of which five ids are real to the sampler."""
    root = tmp_path_factory.mktemp("tiny")
    for name, seed in (("target", 0), ("draft", 1)):
        model = make_llama(seed=seed, hidden=32, layers=1)
        with torch.no_grad():
            model.lm_head.weight[TINY:] = 0
            model.lm_head.weight[:TINY] *= 3
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule.lossless])
@pytest.mark.parametrize("options", LAWS, ids=str)
def test_sampled_texts_have_the_targets_law_end_to_end(tiny_pair, rule, options):
    """Chi-square of three-token texts against exact enumeration of the target's law."""
    prompt, count, n = [1, 2], 3, 1500
    law = _enumerate(tiny_pair / "target", prompt, count, options)
    with SpeculativeDecoder.from_pretrained(
        str(tiny_pair / "target"),
        str(tiny_pair / "draft"),
        dtype="float32",
        rule=rule,
        draft_tokens=2,
        max_sessions=n,
        kv_cache_tokens=16 * n,
    ) as decoder:
        decoder._target.thread._engine._vocab_limit = TINY
        decoder._draft.thread._engine._vocab_limit = TINY
        counts = dict.fromkeys(law, 0)
        for seed in range(0, n, 250):
            for s in range(seed, seed + 250, 50):
                texts = _sample(decoder, prompt, count, range(s, s + 50), options)
                for text in texts:
                    counts[text] += 1
    observed, expected = _pooled(counts, law, n)
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def _sample(decoder, prompt, count, seeds, options):
    requests = [
        decoder._request(prompt, max_tokens=count, ignore_eos=True, seed=s, **options)
        for s in seeds
    ]
    return [g.token_ids for g in decoder._run(decoder._gather(requests))]


@torch.inference_mode()
def _enumerate(folder, prompt, count, options):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    law = {}
    for text in itertools.product(range(TINY), repeat=count):
        logits = model(torch.tensor([[*prompt, *text[:-1]]])).logits[0, len(prompt) - 1 :, :TINY]
        rows = RowParams.of([SamplingParams(**options)] * count, [0] * count, torch.device("cpu"))
        sparse = distribution(logits, rows)
        table = torch.zeros(count, TINY).scatter(1, sparse.ids, sparse.probs).double()
        law[text] = float(np.prod([table[i, token] for i, token in enumerate(text)]))
    return law


def _pooled(counts, law, n):
    """Counts and expectations with rare texts pooled."""
    often = [text for text, p in law.items() if p * n >= 5]
    rest = n - sum(counts[text] for text in often)
    rest_expected = n - sum(law[text] * n for text in often)
    observed = [counts[text] for text in often]
    expected = [law[text] * n for text in often]
    if rest_expected > 1e-6:
        observed.append(rest)
        expected.append(rest_expected)
    expected = np.array(expected) * sum(observed) / sum(expected)
    return observed, expected


def test_a_draft_goes_with_its_method_only():
    for draft, method in (("x", Method.PROMPT_LOOKUP), (None, Method.DRAFT_MODEL)):
        with pytest.raises(ConfigError, match="goes with method draft_model"):
            SpeculativeDecoder.from_pretrained("x", draft, method=method)
