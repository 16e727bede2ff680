"""Structured output as clients ask for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec_ray.engine.grammar import Grammars
from specdec_ray.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Structure:
    """What the output must match.

    Attributes:
        field: what the client called it.
        form: makes a grammar of the value, one of `sampling.structure`.
        value: as the client gave it.
    """

    field: str
    form: Callable[[Any], str]
    value: Any

    def grammar(self, grammars: Grammars | None) -> str:
        """The grammar, found fit for the model.

        Raises:
            InvalidParameter: it cannot be followed.
        """
        try:
            if grammars is None:
                raise InvalidParameter(self.field, "this model cannot follow a grammar")
            grammar = self.form(self.value)
            grammars.start(grammar, prompt_length=0)
        except InvalidParameter as error:
            raise InvalidParameter(self.field, error.message) from None
        return grammar
