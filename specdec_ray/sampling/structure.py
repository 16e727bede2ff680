"""What an output can be made to match, as `SamplingParams.grammar`: llguidance's form."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from specdec_ray.errors import InvalidParameter


def json_schema(schema: str | Mapping[str, Any]) -> str:
    """JSON that a schema, or a schema's JSON text, describes (json-schema.org, 2020-12).

    Raises:
        InvalidParameter: the schema is no JSON object.
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return LLMatcher.grammar_from_json_schema(
            json.dumps(json.loads(text)),
            # Blanks between values are JSON: without a bound a model may emit nothing else.
            defaults={"whitespace_pattern": r"[ \n\t]{0,20}"},
        )
    except (ValueError, RecursionError) as error:
        raise InvalidParameter("grammar", f"the schema is no JSON object: {error}") from None


def regex(pattern: str) -> str:
    """The whole output matches a regular expression (Rust's syntax, no look-around)."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str]) -> str:
    """One of the texts.

    Raises:
        InvalidParameter: there are none.
    """
    if not texts:
        raise InvalidParameter("grammar", "needs at least one text")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def context_free(grammar: str) -> str:
    """A context-free grammar in Lark's notation, or in llama.cpp's GBNF.

    Raises:
        InvalidParameter: GBNF that cannot be read.
    """
    try:
        return any_to_lark(grammar)
    except GbnfToLarkError as error:
        raise InvalidParameter("grammar", str(error)) from None
