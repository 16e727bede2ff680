"""The Target and Draft deployments: an engine thread, its data plane, and leases on sessions."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve

from specdec_ray.config import ModelConfig, SpecdecConfig
from specdec_ray.engine.build import BuiltEngine, build_draft, build_target, set_threads
from specdec_ray.engine.sessions import ReplicaIdentity
from specdec_ray.serve.round_server import RoundServer
from specdec_ray.serve.wire import WireLimits
from specdec_ray.speculation.shape import MAX_NODES

logger = logging.getLogger("ray.serve")

STALLED_STEP_S = 60.0


class _EngineReplica:
    """What both roles share. Rounds do not come through Serve: a session takes one Serve call,
    its lease, and its rounds go over the replica's own gRPC stream."""

    _server: RoundServer | None = None  # stays None when the model could not be loaded

    async def _start(self, built: BuiltEngine) -> None:
        self._engine = built.thread
        self._context_length = built.context_length
        self._server = RoundServer(
            built.thread,
            WireLimits(
                max_context_tokens=built.context_length,
                max_nodes=MAX_NODES,
            ),
        )
        host = ray.util.get_node_ip_address()
        self._address = await self._server.start(host)
        logger.info("data plane on %s, context %d tokens", self._address, built.context_length)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Published by Serve with the replica; routers find the data plane through it."""
        return {"address": self._address, "context_length": self._context_length}

    async def lease(self) -> AsyncIterator[bytes]:
        """Hold a session open: yields its unguessable id once, and frees it when cancelled.

        The open call is what Serve sees of a session: it counts for admission and autoscaling,
        is drained on scale-down, and reports the replica's death.
        """
        session_id = secrets.token_bytes(16)
        self._engine.lease(session_id)
        try:
            yield session_id
            await asyncio.Event().wait()
        finally:
            self._engine.release(session_id)

    async def statistics(self) -> dict[str, float]:
        """Sessions held, sessions waiting for KV, free KV blocks, and the engine's busy time."""
        load = self._engine.load
        return {
            "sessions": self._engine.session_count,
            "waiting": load.waiting,
            "free_blocks": load.free_blocks,
            "busy_s": self._engine.busy_s,
        }

    def check_health(self) -> None:
        """Serve restarts the replica when this raises: the engine thread is dead or stuck."""
        reason = self._engine.unhealthy_reason(STALLED_STEP_S)
        if reason is not None:
            raise RuntimeError(reason)

    async def __del__(self) -> None:
        if self._server is not None:
            await self._server.stop()
            await asyncio.to_thread(self._engine.stop)


class TargetReplica(_EngineReplica):
    """Deployment `Target`: owns the truth."""

    async def __init__(self, config: SpecdecConfig) -> None:  # type: ignore[misc]
        set_threads(_threads(config.target))
        built = await asyncio.to_thread(
            build_target, config.target, config.speculation, _identity()
        )
        await self._start(built)


class DraftReplica(_EngineReplica):
    """Deployment `Draft`: proposes; losing it costs speed only."""

    async def __init__(self, config: SpecdecConfig) -> None:  # type: ignore[misc]
        assert config.draft is not None, "build_app deploys a draft only where there is one"
        set_threads(_threads(config.draft))
        shape = config.speculation.shape
        built = await asyncio.to_thread(
            build_draft, config.draft, config.target, shape, _identity()
        )
        await self._start(built)


def _identity() -> ReplicaIdentity:
    return ReplicaIdentity(serve.get_replica_context().replica_tag, time.time_ns())


def _threads(config: ModelConfig) -> int:
    assigned = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    return config.threads or max(1, int(assigned))
