"""Server-sent events whose generator is closed whatever happens to the connection."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Streams frames; closing `frames` frees what they hold, so it happens on every way out."""

    def __init__(self, frames: AsyncGenerator[str, None]) -> None:
        super().__init__(frames, media_type="text/event-stream", headers=HEADERS)
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            await super().__call__(scope, receive, send)


def frame(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload, separators=(',', ':'))}\n\n"
