import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_ray.rounds.request import Emission, GenerationRequest
from specdec_ray.rounds.text import Detokenizer, FinishReason, StopStrings, TextStream
from specdec_ray.sampling.params import SamplingParams

EOS = 257
BYTES = st.text(max_size=30).map(lambda s: s.encode())


@pytest.fixture(scope="module")
def to_ids(tokenizer):
    return lambda text: tokenizer(text)["input_ids"]


@pytest.fixture
def stream_of(tokenizer):
    def make(max_tokens=100, **options):
        request = GenerationRequest((1,), SamplingParams(), max_tokens, **options)
        return TextStream(tokenizer, request, frozenset({EOS}), max_draft_tokens=4)

    return make


def feed(stream, ids, per_round=3):
    """Push ids in rounds until the stream ends; text, kept ids, last delta."""
    text, kept, delta = "", [], None
    for start in range(0, len(ids), per_round):
        tokens = tuple(ids[start : start + per_round])
        delta = stream.push(Emission(tokens, len(tokens), max(0, len(tokens) - 1)))
        text += delta.text
        kept += delta.token_ids
        if delta.finish_reason is not None:
            break
    return text, kept, delta


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=40))
def test_pieces_join_to_the_whole(tokenizer, to_ids, text):
    ids = to_ids(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(i) for i in ids] + [detokenizer.flush()]
    assert "".join(pieces) == text


@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(0, 258), max_size=40))
def test_any_ids_join_to_what_decoding_them_at_once_gives(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(i) for i in ids] + [detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_characters_come_whole(stream_of, to_ids):
    text = "a🙂é漢"
    stream = stream_of(max_tokens=len(to_ids(text)))
    pieces = [stream.push(Emission((i,))).text for i in to_ids(text)]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_a_limit_inside_a_character_shows_it_as_incomplete(stream_of, to_ids):
    text, kept, delta = feed(stream_of(max_tokens=3), to_ids("a🙂"))
    assert (text, len(kept), delta.finish_reason) == ("a�", 3, FinishReason.LENGTH)


@pytest.mark.parametrize("offset", range(5))
def test_an_end_token_inside_a_round_ends_everything_there(stream_of, to_ids, offset):
    ids = to_ids("abcde")
    ids[offset] = EOS
    text, kept, delta = feed(stream_of(), ids, per_round=5)
    assert text == "abcde"[:offset]
    assert kept == ids[: offset + 1]
    assert delta.finish_reason is FinishReason.STOP
    assert delta.stop_reason == EOS
    assert delta.stats.per_round_accepted == [min(4, offset + 1)]


def test_ignore_eos_goes_on(stream_of, to_ids):
    ids = to_ids("ab")
    text, kept, _ = feed(stream_of(ignore_eos=True, max_tokens=3), [ids[0], EOS, ids[1]])
    assert text == "ab"
    assert len(kept) == 3


def test_stop_token_ids_end_like_the_models_own(stream_of, to_ids):
    b = to_ids("b")[0]
    _, kept, delta = feed(stream_of(stop_token_ids=frozenset({b})), to_ids("abc"))
    assert len(kept) == 2
    assert delta.stop_reason == b


@pytest.mark.parametrize("per_round", [1, 2, 3, 17])
@pytest.mark.parametrize("stop", ["STOP", "O", "xSTOPx", "🙂"])
def test_stop_strings_across_rounds(stream_of, to_ids, per_round, stop):
    whole = "before 🙂 it xSTOPx after"
    text, kept, delta = feed(stream_of(stop=(stop,)), to_ids(whole), per_round)
    at = whole.index(stop)
    assert text == whole[:at]
    assert kept == to_ids(whole[: at + len(stop)])
    assert delta.finish_reason is FinishReason.STOP
    assert delta.stop_reason == stop
    assert sum(delta.stats.per_round_accepted) <= len(kept)


def test_the_earliest_of_several_stops_wins(stream_of, to_ids):
    text, _, delta = feed(stream_of(stop=("cd", "bc")), to_ids("abcd"), per_round=4)
    assert (text, delta.stop_reason) == ("a", "bc")


def test_only_what_may_begin_a_stop_is_held_back():
    stops = StopStrings(("aaab" * 10,))
    assert stops.push("xyz") == ("xyz", None)
    assert stops.push("aa") == ("", None)
    assert stops.push("z") == ("aaz", None)
    assert stops.push("aaab") == ("", None)
    assert stops.flush() == "aaab"


def test_what_was_held_appears_at_the_end(stream_of, to_ids):
    text, _, delta = feed(stream_of(stop=("end.",), max_tokens=6), to_ids("at end"))
    assert text == "at end"
    assert delta.finish_reason is FinishReason.LENGTH


def test_a_stop_completed_by_the_limit_still_counts(stream_of, to_ids):
    text, _, delta = feed(stream_of(stop=("end",), max_tokens=6), to_ids("at end"))
    assert text == "at "
    assert delta.finish_reason is FinishReason.STOP


def test_statistics_count_proposing_rounds_up_to_the_cut(stream_of, to_ids):
    stream = stream_of(max_tokens=5)
    stream.push(Emission((to_ids("a")[0],)))
    stream.push(Emission(tuple(to_ids("bc")), 3, 1))
    delta = stream.push(Emission(tuple(to_ids("defgh")), 4, 4))
    assert delta.stats.per_round_proposed == [3, 4]
    assert delta.stats.per_round_accepted == [1, 2]
