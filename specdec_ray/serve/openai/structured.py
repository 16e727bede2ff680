"""Structured output in request bodies: OpenAI's response_format, vLLM's structured_outputs, and its
older guided_ keys. At most one of them may ask for something."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdec_ray.errors import InvalidParameter
from specdec_ray.sampling.structure import choice, context_free, json_schema, regex
from specdec_ray.serve.structure import Structure

JsonSchema = dict[str, Any]
Choices = Annotated[list[str], Field(fail_fast=True)]

_ANY_OBJECT = {"type": "object"}
_FORMS = {"json": json_schema, "regex": regex, "choice": choice, "grammar": context_free}


class NamedSchema(BaseModel):
    """A schema as OpenAI's clients send it; it is always followed strictly."""

    model_config = ConfigDict(strict=True)

    value: JsonSchema = Field(alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def structure(self) -> Structure | None:
        if self.type == "json_schema":
            if self.json_schema is None:
                raise InvalidParameter("response_format", "json_schema is missing")
            return Structure("response_format", json_schema, self.json_schema.value)
        if self.type == "json_object":
            return Structure("response_format", json_schema, _ANY_OBJECT)
        return None


class StructuredOutputs(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    json_value: str | JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def structures(self) -> list[Structure]:
        found = [
            Structure(f"structured_outputs.{key}", form, value)
            for (key, form), value in zip(
                _FORMS.items(),
                (self.json_value, self.regex, self.choice, self.grammar),
                strict=True,
            )
            if value is not None
        ]
        if self.json_object:
            found.append(Structure("structured_outputs.json_object", json_schema, _ANY_OBJECT))
        return found


class StructuredBody(BaseModel):
    """The keys of a body that ask for structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def structure(self) -> Structure | None:
        """What the output must match.

        Raises:
            InvalidParameter: several keys ask for something.
        """
        found = [
            Structure(f"guided_{key}", form, value)
            for key, form in _FORMS.items()
            if (value := getattr(self, f"guided_{key}")) is not None
        ]
        if self.structured_outputs:
            found += self.structured_outputs.structures()
        if self.response_format and (asked := self.response_format.structure()):
            found.append(asked)
        if len(found) > 1:
            raise InvalidParameter(found[1].field, f"is in conflict with {found[0].field}")
        return found[0] if found else None
