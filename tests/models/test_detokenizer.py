import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from specdec_ray.models.detokenizer import MAX_HELD_TOKENS, Detokenizer

EOS = 257


def run(tokenizer, ids, before=()):
    detokenizer = Detokenizer(tokenizer, before)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


def window_sizes(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    sizes = []
    for i in ids:
        detokenizer.push(i)
        sizes.append(len(detokenizer._window))
    return sizes


@pytest.fixture(scope="module")
def byte_ids(tokenizer):
    """Ids of raw bytes, which need not be valid UTF-8."""
    order = tokenizer.convert_tokens_to_ids
    alphabet = _byte_to_unicode()
    return lambda data: [order(alphabet[byte]) for byte in data]


@pytest.fixture(scope="module")
def sentencepiece_like():
    """Metaspace pieces with byte fallback, as Llama 2 has them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "a", "▁a", "é", "。"]
    core = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>")
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


@pytest.fixture(scope="module")
def chunky():
    """Byte-level tokens that end and begin inside characters, as merges make them."""
    alphabet = _byte_to_unicode()
    chunks = [bytes([byte]) for byte in range(256)]
    chunks += [b"\xff\xc3", b"\xa9\xff", b"\xa9a\xf0\x9f", b"\x99\x82\xe6", b"\xbc\xa2 b"]
    names = ["".join(alphabet[byte] for byte in chunk) for chunk in chunks]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


class PlainPython(PreTrainedTokenizer):
    """A tokenizer without a Rust backend; ids are letters."""

    def __init__(self, **options):
        self.letters = [chr(i) for i in range(32, 127)]
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return {letter: i for i, letter in enumerate(self.letters)}

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token)

    def _convert_id_to_token(self, index):
        return self.letters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


CHARACTERS = st.text(st.characters(codec="utf-8"), max_size=12).map(str.encode)
INVALID = st.binary(max_size=20)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(CHARACTERS | INVALID, max_size=4))
def test_bytes_valid_or_not_join_to_their_decoding(tokenizer, byte_ids, parts):
    ids = byte_ids(b"".join(parts))
    assert "".join(run(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(
        st.integers(256, 260) | st.sampled_from([0x61, 0xFF, 0xC3, 0xA9, 0xE6, 0xBC, 0xA2]),
        max_size=40,
    )
)
def test_tokens_that_cross_characters_join_to_their_decoding(chunky, ids):
    assert "".join(run(chunky, ids)) == chunky.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("garbage", range(16))
def test_letting_garbage_go_splits_no_character(chunky, garbage):
    """A whole é in a window that still ends in garbage, at every place of it."""
    ids = [0xFF] * garbage + [256, 257] + [0xFF] * (16 - garbage) + [0x61]
    assert "".join(run(chunky, ids)) == chunky.decode(ids)


@pytest.mark.parametrize("prefix", range(4))
def test_a_character_after_long_garbage_is_whole(tokenizer, byte_ids, prefix):
    ids = byte_ids(b"\xff" * (3 * MAX_HELD_TOKENS + prefix) + "é🙂".encode())
    assert "".join(run(tokenizer, ids)).endswith("�é🙂")


def test_garbage_is_held_for_a_bounded_time_and_window(tokenizer, byte_ids):
    ids = byte_ids(b"\xff" * 200)
    detokenizer = Detokenizer(tokenizer)
    sent = 0
    for count, token in enumerate(ids, 1):
        sent += len(detokenizer.push(token))
        assert count - sent <= MAX_HELD_TOKENS
    assert max(window_sizes(tokenizer, ids)) <= MAX_HELD_TOKENS + 1


def test_the_window_does_not_grow_with_the_text_or_with_end_tokens(tokenizer, byte_ids):
    assert max(window_sizes(tokenizer, byte_ids("漢字🙂 and text".encode() * 30))) <= 8
    assert max(window_sizes(tokenizer, [*byte_ids(b"a"), *[EOS] * 100])) <= 2


@pytest.mark.parametrize("cut", range(1, 11))
def test_no_piece_shows_half_a_character(tokenizer, byte_ids, cut):
    ids = byte_ids("é漢🙂".encode())
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(i) for i in ids[:cut]]
    assert "�" not in "".join(pieces)


PIECES = st.lists(st.sampled_from(["▁", "▁Hello", "▁world", "a", "▁a", "é", "。", "</s>"]))


@settings(max_examples=150, deadline=None)
@given(pieces=PIECES, emoji=st.booleans())
def test_sentencepiece_spaces_and_bytes(sentencepiece_like, pieces, emoji):
    ids = sentencepiece_like.convert_tokens_to_ids(pieces)
    if emoji:
        fallback = [f"<0x{byte:02X}>" for byte in "漢🙂é".encode()]
        ids = ids + sentencepiece_like.convert_tokens_to_ids(fallback) + ids
    whole = sentencepiece_like.decode(ids, skip_special_tokens=True)
    assert "".join(run(sentencepiece_like, ids)) == whole


@settings(max_examples=150, deadline=None)
@given(prompt=PIECES, completion=PIECES)
def test_a_continued_text_joins_its_beginning(sentencepiece_like, prompt, completion):
    """A completion keeps the space before its first word, unless nothing stands before it."""
    tokenizer = sentencepiece_like
    before, after = map(tokenizer.convert_tokens_to_ids, (prompt, completion))
    text = tokenizer.decode(before, skip_special_tokens=True)
    whole = tokenizer.decode(before + after, skip_special_tokens=True)
    if text:
        assert text + "".join(run(tokenizer, after, before)) == whole


def test_a_prompt_that_ends_inside_a_character_is_not_continued(tokenizer, byte_ids):
    before, after = byte_ids(b"a\xc3"), byte_ids(b"\xa9b")
    assert "".join(run(tokenizer, after, before)) == "\ufffdb"


def test_invalid_fallback_bytes_do_not_stop_the_text(sentencepiece_like):
    names = ["<0xFF>"] * 30 + ["▁Hello", "▁world"]
    text = "".join(run(sentencepiece_like, sentencepiece_like.convert_tokens_to_ids(names)))
    assert text == "�" * 30 + " Hello world"


def test_a_tokenizer_without_a_fast_backend():
    tokenizer = PlainPython()
    ids = tokenizer("a , b .")["input_ids"]
    assert "".join(run(tokenizer, ids)) == "a , b ."


def _byte_to_unicode():
    """The alphabet of byte-level BPE (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown}
    table.update({byte: chr(256 + i) for i, byte in enumerate(hidden)})
    return table
