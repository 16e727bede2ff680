"""Drafts whose vocabulary is smaller than the target's, or padded."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_ray import SpeculativeDecoder
from specdec_ray.engine.build import first_difference
from specdec_ray.sampling.structure import regex

SHARED = 190  # ids of the smaller vocabularies
DRAFTS = {"padded": 320, "smaller model": SHARED, "smaller tokenizer": 259, "smaller": SHARED}
PARAMS = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.5},
    "grammar": {"temperature": 0.9, "seed": 4, "grammar": regex("[a-zé ]{60}")},
}


@pytest.fixture(scope="module")
def folders(make_llama, tokenizer, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, vocab in ({"target": 259} | DRAFTS).items():
        make_llama(noise=0.05 if name != "target" else 0, vocab=vocab).save_pretrained(root / name)
        shorter = name in ("smaller tokenizer", "smaller")
        (_shorter() if shorter else tokenizer).save_pretrained(root / name)
    return {name: str(root / name) for name in ("target", *DRAFTS)}


def _shorter():
    """A tokenizer that knows the first ids only, and no special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:SHARED]
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("params", list(PARAMS))
@pytest.mark.parametrize("draft", list(DRAFTS))
def test_speculation_changes_no_token(folders, draft, params):
    prompt = "Größe? Zażółć 語"  # holds ids that the smaller drafts do not know
    texts = []
    for name in (None, folders[draft]):
        with SpeculativeDecoder.from_pretrained(
            folders["target"], name, dtype="float32", kv_cache_tokens=4096
        ) as decoder:
            texts.append(decoder.generate(prompt, max_tokens=60, ignore_eos=True, **PARAMS[params]))
    plain, drafted = texts
    assert drafted.token_ids == plain.token_ids
    assert max(plain.token_ids) >= SHARED, "the target emitted what the draft does not know"
    rounds, accepted = drafted.stats.per_round_proposed, drafted.stats.per_round_accepted
    assert 1 + len(rounds) + sum(accepted) >= 60 - 1, "the draft is given up"


def test_a_tokenizer_with_holes_is_compared_behind_them():
    holed, other = _holed("zz"), _holed("yy")
    assert first_difference(holed, holed) is None
    assert "token id 9 is 'zz' for the target and 'yy'" in first_difference(holed, other)


def _holed(last):
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, last: 9, "d": 10}))
    return PreTrainedTokenizerFast(tokenizer_object=core)
