"""What happens around a request: its id, its size, and a client that leaves."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec_ray.serve.openai.errors import ApiError, api_error
from specdec_ray.serve.requests import name_request

T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled as soon as the client leaves.

    Servers tell an application that its client left only if it listens.

    Raises:
        ClientLeft: the client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class RequestIds:
    """Echoes a sane x-request-id, or gives one; with it goes every answer, that to a bug too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = name_request(Request(scope).headers.get("x-request-id", ""))
        started = False

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"].append((b"x-request-id", request_id.encode()))
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except Exception as error:
            if started:
                raise
            await api_error(error).response()(scope, receive, tagged)


class BodyLimit:
    """Refuses bodies over the limit, before reading them where their length is declared."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Request(scope).headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._limit:
            await self._refusal(int(declared))(scope, receive, send)
            return
        body = await self._read(receive)
        if body is None:
            await self._refusal(self._limit + 1)(scope, receive, send)
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body, or None if it passes the limit."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                break
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limit:
                return None
        return bytes(body)

    def _refusal(self, size: int) -> JSONResponse:
        message = f"body: limit is {self._limit} bytes, got at least {size}"
        return ApiError(413, message, "invalid_request_error", None, "body_too_large").response()
