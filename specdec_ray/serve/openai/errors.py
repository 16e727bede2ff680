"""Errors as the OpenAI API writes them: one table from exceptions to statuses and objects."""

import logging
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specdec_ray.errors import ContextOverflow, EngineLost, InvalidParameter, Overloaded
from specdec_ray.serve.openai.schema import UnsupportedParameter
from specdec_ray.serve.requests import UnknownModel, request_id

logger = logging.getLogger("ray.serve")

INVALID = "invalid_request_error"
RETRY_UNAVAILABLE_S = 2


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error as a client sees it.

    Attributes:
        retry_after_s: when set, sent as Retry-After, whole seconds, rounded up.
    """

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, -int(-self.retry_after_s // 1)))
        return JSONResponse(self.body, self.status, headers)


def api_error(error: Exception) -> ApiError:
    """What a client is told of an exception; details of unexpected ones stay in the log."""
    if isinstance(error, InvalidParameter):
        codes = {
            ContextOverflow: "context_length_exceeded",
            UnsupportedParameter: "unsupported_parameter",
            UnknownModel: "model_not_found",
        }
        status = 404 if isinstance(error, UnknownModel) else 400
        return ApiError(status, str(error), INVALID, error.field, codes.get(type(error)))
    if isinstance(error, Overloaded):
        return ApiError(
            429, str(error), "rate_limit_error", None, "queue_full", error.retry_after_s
        )
    if isinstance(error, EngineLost):
        logger.warning("request %s: no engine: %s", request_id.get(), error)
        message = "no model replica is available"
        return ApiError(503, message, "server_error", None, "unavailable", RETRY_UNAVAILABLE_S)
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took too long", "timeout_error", None, "timeout")
    logger.error("request %s failed", request_id.get(), exc_info=error)
    return ApiError(500, "internal error", "server_error")


def install_handlers(app: FastAPI) -> None:
    """Answer every error with an error object."""

    async def on_error(_: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    async def on_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error).response()

    async def on_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        response = ApiError(error.status_code, str(error.detail), INVALID, None, code).response()
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    for kind in (InvalidParameter, Overloaded, EngineLost, TimeoutError, Exception):
        app.add_exception_handler(kind, on_error)


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first fault pydantic found, named by its field."""
    fault = error.errors()[0]
    if fault["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", INVALID)
    # A union's faults carry the branch's name after the field: the field is what the client wrote.
    path = [part for part in fault["loc"] if part != "body"]
    if not path:
        return ApiError(400, "the body must be a JSON object, sent as application/json", INVALID)
    field = str(path[0])
    if fault["type"] == "missing" and len(path) == 1:
        return ApiError(400, f"{field}: is required", INVALID, field, "missing_required_parameter")
    given = "" if fault["type"] == "missing" else f", got {fault['input']!r:.80}"
    return ApiError(400, f"{field}: {fault['msg']}{given}", INVALID, field)
