"""Ports to an engine in this process: the library and the tests use these."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specdec_ray.engine.loop import EngineThread
from specdec_ray.engine.messages import Reply, Request


class InProcessSession:
    """A session on an engine thread of this process."""

    def __init__(self, engine: EngineThread, session_id: bytes) -> None:
        self._engine = engine
        self._session_id = session_id

    @property
    def session_id(self) -> bytes:
        return self._session_id

    def call(self, request: Request) -> asyncio.Future[Reply]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Reply] = loop.create_future()

        def settle(reply: Reply) -> None:
            if not answer.done():  # the caller may have been cancelled meanwhile
                answer.set_result(reply)

        def sink(replies: list[Reply]) -> None:
            loop.call_soon_threadsafe(settle, replies[0])

        self._engine.submit(request, sink)
        return answer


class InProcessPool:
    """A pool of one engine."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    @asynccontextmanager
    async def session(self) -> AsyncIterator[InProcessSession]:
        session_id = secrets.token_bytes(16)
        self._engine.lease(session_id)
        try:
            yield InProcessSession(self._engine, session_id)
        finally:
            self._engine.release(session_id)
