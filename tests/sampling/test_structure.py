"""What a grammar allows at each row, and what is none."""

import json

import pytest

from specdec_ray.errors import InvalidParameter
from specdec_ray.sampling.params import MAX_GRAMMAR_CHARS
from specdec_ray.sampling.structure import choice, context_free, json_schema, regex

EOS = 257


@pytest.fixture
def ids(tokenizer):
    return lambda text: tuple(tokenizer(text)["input_ids"])


def allowed_at(state, tokens, paths):
    return [set(row.nonzero()[:, 0].tolist()) for row in state.allowed(tokens, paths)]


def test_each_row_has_the_mask_below_its_own_path(grammars, ids):
    state = grammars.start(choice(["cat", "cow", "dog"]), prompt_length=2)
    prompt = [1, 2]
    root, c, ca, cat, d, x = allowed_at(
        state, prompt, [(), ids("c"), ids("ca"), ids("cat"), ids("d"), ids("x")]
    )
    assert root == set(ids("cd"))
    assert c == set(ids("ao"))
    assert ca == set(ids("t"))
    assert cat == {EOS}
    assert d == set(ids("o"))
    assert len(x) > 1, "below a forbidden node nothing matters, but something must be allowed"


def test_drafts_leave_no_trace_and_committed_tokens_do(grammars, ids):
    state = grammars.start(choice(["cat", "cow", "dog"]), prompt_length=0)
    for _ in range(3):
        assert allowed_at(state, [], [ids("do"), ()]) == [set(ids("g")), set(ids("cd"))]
    assert allowed_at(state, ids("co"), [()]) == [set(ids("w"))]
    assert allowed_at(state, ids("cow"), [()]) == [{EOS}]
    assert allowed_at(state, (*ids("cow"), EOS), [(), ids("x")])[0], "past the end: never empty"


def test_a_path_may_end_the_text_and_go_on(grammars, ids):
    """Drafts run past an end token."""
    state = grammars.start(choice(["a"]), prompt_length=0)
    rows = allowed_at(state, [], [(*ids("a"), EOS), (*ids("a"), EOS, 5), ()])
    assert all(rows)
    assert rows[-1] == set(ids("a"))


def test_a_text_reopened_elsewhere_goes_on_where_it_was(grammars, ids):
    tokens = [7, 7, *ids('{"a": 1')]
    grammar = json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    going = grammars.start(grammar, prompt_length=2)
    for length in range(2, len(tokens) + 1):
        last = allowed_at(going, tokens[:length], [()])
    assert allowed_at(grammars.start(grammar, prompt_length=2), tokens, [()]) == last


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (json_schema('{"type": "integer"}'), "123"),
        (json_schema({}), '{"a": [1, "é"]}'),
        (regex(r"[a-c]+\d"), "abc1"),
        (choice(['quoted "text"\n', "é"]), 'quoted "text"\n'),
        (context_free('start: "a" b\nb: "b"'), "ab"),
        (context_free('root ::= "a" b\nb ::= "b"'), "ab"),
    ],
)
def test_forms(grammars, ids, grammar, text):
    tokens = ids(text)
    masks = grammars.start(grammar, 0).allowed([], [tokens[:n] for n in range(len(tokens))])
    assert all(mask[token] for mask, token in zip(masks, tokens, strict=True))
    assert EOS in allowed_at(grammars.start(grammar, 0), tokens, [()])[0]


@pytest.mark.parametrize(
    "grammar",
    [
        lambda: json_schema("{"),
        lambda: json_schema("[]"),
        lambda: json_schema("true"),
        lambda: json_schema({"type": "foo"}),
        lambda: json_schema({"$ref": "#/nope"}),
        lambda: json_schema({"unevaluatedProperties": False}),
        lambda: regex("a(+b"),
        lambda: choice([]),
        lambda: context_free("start: foo"),
        lambda: context_free('root ::= "a'),
        lambda: json_schema({"enum": ["x" * MAX_GRAMMAR_CHARS]}),
        lambda: json.dumps({"grammars": []}),
        lambda: "no grammar",
    ],
)
def test_what_cannot_be_followed_is_refused(grammars, grammar):
    with pytest.raises(InvalidParameter) as error:
        grammars.start(grammar(), 0)
    assert "backtrace" not in str(error.value)
