"""One text under two tokenizers."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec_ray.bundled import TARGET
from specdec_ray.models.translation import WINDOW_TOKENS, TokenizerPair, Translation, encode

TEXT = (
    "import json\n\n\ndef load(path: str) -> dict:\n    with open(path) as f:\n"
    "        return json.load(f)  # naïve, but 3.14 times as fast — as 漢字🙂!\n"
)
KINDS = ["words", "bytes", "pieces"]


@pytest.fixture(scope="module")
def kinds(tokenizer):
    words = AutoTokenizer.from_pretrained(TARGET)
    return {"words": words, "bytes": tokenizer, "pieces": _pieces(words)}


def _pieces(words):
    """Metaspace pieces without any pre-tokenization and with byte fallback, as Llama 2 has them."""
    content = json.loads(words.backend_tokenizer.to_str())["model"]
    merges = [
        tuple(part.replace("Ġ", "▁") for part in merge)
        for merge in content["merges"]
        if not set("".join(merge)) & set("ĊÂâÃð")
    ]
    singles = sorted({c for merge in merges for part in merge for c in part} | {"▁"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *singles]
    pieces += [left + right for left, right in merges]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [merge for merge in merges if set(merge) <= set(vocab)]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def ids(tokenizer, text):
    return [token.id for token in encode(tokenizer, text)]


def decode(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("draft", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ids_are_those_of_the_text_whatever_steps_it_comes_in(kinds, target, draft, data):
    pair = TokenizerPair(kinds[target], kinds[draft])
    tokens = ids(kinds[target], TEXT * 2)
    steps = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=60))
    size = steps[0]
    translation, held = Translation(pair, tokens[:size]), []
    assert len(translation) > 0
    for step in [0, *steps[1:]]:
        translation.extend(tokens[size : size + step])
        size = min(size + step, len(tokens))
        start, new = translation.unsent()
        assert start <= len(held)
        held[start:] = new
        assert len(held) == len(translation)
        text = decode(kinds[target], tokens[:size])
        if translation.complete:
            assert held == ids(kinds[draft], text)
    assert translation.tokens == tokens[:size]


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_what_the_draft_says_comes_back_as_the_targets_own_tokens(kinds, target, draft):
    """Guesses are right up to where the draft's text ends inside a token of the target."""
    pair = TokenizerPair(kinds[target], kinds[draft])
    tokens = ids(kinds[target], TEXT)
    right = proposed = 0
    for size in range(1, len(tokens) - 8):
        translation = Translation(pair, tokens[:size])
        if not translation.complete or "\ufffd" in decode(kinds[target], tokens[:size]):
            continue
        at = len(decode(kinds[target], tokens[:size]))
        said = [token for token in encode(kinds[draft], TEXT) if token.end > at]
        if said[0].start < at:
            continue  # a draft that was given half of its token goes on in another way
        guess = translation.back([token.id for token in said[: round(6 * pair.ratio)]])
        expected = tokens[size : size + len(guess)]
        wrong = [at for at, (a, b) in enumerate(zip(guess, expected, strict=False)) if a != b]
        right += wrong[0] if wrong else len(guess)
        proposed += len(guess)
    assert right > 0.8 * proposed > 0


def test_half_a_character_is_not_complete(kinds):
    pair = TokenizerPair(kinds["bytes"], kinds["words"])
    start, first, second = ids(kinds["bytes"], "aé")
    translation = Translation(pair, [start])
    translation.extend([first])
    assert not translation.complete
    translation.extend([second])
    assert translation.complete
    assert translation.unsent() == (0, tuple(ids(kinds["words"], "aé")))


def test_special_tokens_are_no_text(kinds):
    pair = TokenizerPair(kinds["words"], kinds["bytes"])
    translation = Translation(pair, [0, *ids(kinds["words"], "a b")])
    translation.extend([1])
    assert translation.complete
    assert translation.unsent() == (0, tuple(ids(kinds["bytes"], "a b")))
    translation.extend([1])
    assert translation.unsent() == (3, ())


def test_a_text_begins_as_the_drafts_tokenizer_begins_it(kinds):
    pair = TokenizerPair(kinds["words"], kinds["pieces"])
    text = ids(kinds["pieces"], "a b")
    tokens = ids(kinds["words"], "a b")
    assert Translation(pair, tokens).unsent() == (0, tuple(text))
    beginning = copy.deepcopy(kinds["pieces"])
    beginning.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    pair = TokenizerPair(kinds["words"], beginning)
    assert Translation(pair, tokens).unsent() == (0, (1, *text))
    assert Translation(pair, [0]).unsent() == (0, (1,))


def test_a_draft_never_reads_nothing(kinds):
    """A prompt of special tokens is no text at all."""
    translation = Translation(TokenizerPair(kinds["words"], kinds["bytes"]), [0])
    assert translation.unsent() == (0, tuple(ids(kinds["bytes"], "\n")))


def test_a_long_text_is_not_encoded_again(kinds, monkeypatch):
    """The work of a step does not grow with the text."""
    pair = TokenizerPair(kinds["words"], kinds["bytes"])
    translation = Translation(pair, ids(kinds["words"], TEXT * 50))
    lengths = []
    monkeypatch.setattr(
        "specdec_ray.models.translation.encode",
        lambda tokenizer, text, start=0: (
            lengths.append(len(text)) or encode(tokenizer, text, start)
        ),
    )
    translation.extend(ids(kinds["words"], " and more"))
    assert max(lengths) < 4 * WINDOW_TOKENS
