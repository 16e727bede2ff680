"""What the round loop needs from the outside: a session on an engine, wherever the engine runs."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from specdec_ray.engine.messages import Reply, Request


class EngineSession(Protocol):
    """One session on one engine replica."""

    @property
    def session_id(self) -> bytes: ...

    def call(self, request: Request) -> asyncio.Future[Reply]:
        """Send one message of this session now; the future is its answer.

        Raises (here or from the future):
            EngineLost: the replica is gone or its stream broke.
        """
        ...


class EnginePool(Protocol):
    """Replicas of one role. Leaving the context closes the session and frees its KV."""

    def session(self) -> AbstractAsyncContextManager[EngineSession]:
        """Open a lease on some replica.

        Raises (on entering):
            EngineLost: no replica answers.
            Overloaded: every replica is full.
        """
        ...
