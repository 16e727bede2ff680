"""Server-sent events whose generators are closed whatever happens to the connection."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Streams frames; closing them and their source frees what they hold: on every way out.

    Args:
        source: what the frames are made from. Closing frames that never began, because the client
            was gone already, would not reach it.
    """

    def __init__(
        self, frames: AsyncGenerator[str, None], source: AsyncGenerator[Any, None]
    ) -> None:
        super().__init__(frames, media_type="text/event-stream", headers=HEADERS)
        self._frames, self._source = frames, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._frames):
            await super().__call__(scope, receive, send)


def frame(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload, separators=(',', ':'))}\n\n"
