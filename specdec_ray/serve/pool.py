"""Replicas of one deployment as a pool of sessions: a Serve lease plus a gRPC stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

from specdec_ray.errors import EngineLost, Overloaded
from specdec_ray.rounds.ports import EngineSession
from specdec_ray.serve.round_client import ConnectionCache

_GONE = (
    ActorDiedError,
    ActorUnavailableError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)


class ServePool:
    """The replicas behind a deployment handle.

    Args:
        lease_timeout_s: longest wait for a replica with room for one more session.
    """

    def __init__(
        self, handle: DeploymentHandle, connections: ConnectionCache, lease_timeout_s: float
    ) -> None:
        self._lease = handle.options(stream=True).lease
        self._connections = connections
        self._lease_timeout_s = lease_timeout_s

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EngineSession]:
        """Choose a replica, hold a lease on it, and speak to it over the shared stream.

        Raises:
            EngineLost: the replica died, or none is there.
            Overloaded: no replica had room within `lease_timeout_s`.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._lease_timeout_s):
                    selection = await stack.enter_async_context(self._lease.choose_replica())
                    lease = self._lease.dispatch(selection)
                    stack.callback(lease.cancel)  # an abandoned stream would run on for ever
                    session_id = await anext(lease)
            except (TimeoutError, BackPressureError):
                raise Overloaded("no replica has room for another session") from None
            except _GONE as error:
                raise EngineLost(f"{type(error).__name__} while opening a session") from error
            connection = self._connections.get(selection.replica_metadata["address"])
            yield connection.session(session_id)
