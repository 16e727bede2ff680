"""However tokens fall into rounds, the text is the one that reading them singly would give."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_ray.rounds.request import Emission, GenerationRequest
from specdec_ray.rounds.text import TextStream
from specdec_ray.sampling.params import SamplingParams

EOS = 257
STOPS = ("ab", "abab", "ba\n", "é", "b", "x" * 12)


def naive(tokenizer, ids, request, end_ids):
    """Text, kept ids and reason by decoding everything anew after each token."""
    for count, token in enumerate(ids, 1):
        if token in end_ids:
            return tokenizer.decode(ids[: count - 1], skip_special_tokens=True), count, "stop"
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        found = [at for stop in request.stop if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)], count, "stop"
        if count == request.max_tokens:
            return text, count, "length"
    return None


@st.composite
def generations(draw):
    """Ids of a small alphabet with characters of several bytes, garbage and end tokens."""
    parts = st.sampled_from([b"a", b"b", b"ab", b"\n", "é🙂".encode(), b"\xff", b"\xe6\xbc", b"x"])
    data = b"".join(draw(st.lists(parts, min_size=1, max_size=30)))
    limit = draw(st.integers(1, len(data)))
    cuts = draw(st.lists(st.integers(1, 9), min_size=len(data), max_size=len(data)))
    stops = tuple(draw(st.lists(st.sampled_from(STOPS), max_size=2, unique=True)))
    end_at = draw(st.none() | st.integers(0, len(data) - 1))
    return data, limit, cuts, stops, end_at


@settings(max_examples=400, deadline=None)
@given(generation=generations(), ignore_eos=st.booleans())
def test_rounds_do_not_show(tokenizer, generation, ignore_eos):
    data, limit, cuts, stops, end_at = generation
    ids = [i for byte in data for i in _ids_of(tokenizer, byte)]
    if end_at is not None:
        ids[end_at] = EOS
    request = GenerationRequest((1,), SamplingParams(), limit, stop=stops, ignore_eos=ignore_eos)
    stream = TextStream(tokenizer, request, frozenset({EOS}), max_draft_tokens=9)
    pieces, kept, delta = [], [], None
    for size in cuts:
        tokens = tuple(ids[len(kept) : len(kept) + size])
        delta = stream.push(Emission(tokens, proposed=size, accepted=len(tokens) - 1))
        pieces.append(delta.text)
        kept += delta.token_ids
        if delta.finish_reason is not None:
            break
    text, count, reason = naive(tokenizer, ids, request, set() if ignore_eos else {EOS})
    assert ("".join(pieces), kept, delta.finish_reason) == (text, ids[:count], reason)
    assert sum(delta.stats.per_round_accepted) <= len(kept)
    assert max(delta.stats.per_round_accepted) <= 9


def _ids_of(tokenizer, byte):
    """The one id of a raw byte, valid UTF-8 or not."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    letter = chr(byte) if byte in shown else chr(256 + hidden.index(byte))
    return [tokenizer.convert_tokens_to_ids(letter)]
