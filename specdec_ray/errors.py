"""Errors of the domain. Front doors turn them into HTTP and gRPC statuses in one place each."""


class SpecdecError(Exception):
    """Root of every error this package raises on purpose."""


class InvalidParameter(SpecdecError):
    """A request field has a value outside its limits.

    Args:
        field: name of the field as the client wrote it.
        message: what the limit is and what value was given.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class ContextOverflow(InvalidParameter):
    """Prompt (plus the tokens asked for) does not fit the model's context.

    Args:
        field: the request field that is too long.
        limit: tokens the context holds.
        length: tokens the request needs.
    """

    def __init__(self, field: str, limit: int, length: int) -> None:
        super().__init__(field, f"needs {length} tokens but the context holds {limit}")
        self.limit = limit
        self.length = length


class UnsupportedModel(SpecdecError):
    """A model cannot be served exactly: its state cannot be rolled back, or is not covered."""


class ConfigError(SpecdecError):
    """The configuration asks for something impossible."""


class Overloaded(SpecdecError):
    """The service takes no more work now; the client may retry after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class EngineLost(SpecdecError):
    """The replica that held a session is gone, or its stream broke."""
