"""A router's side of the data plane: one multiplexed stream per engine replica."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from specdec_ray.engine.messages import Proposal, Propose, Reply, Request, Verdict, Verify
from specdec_ray.errors import EngineLost, InvalidParameter, SpecdecError
from specdec_ray.pb import rounds_pb2 as pb
from specdec_ray.pb import rounds_pb2_grpc
from specdec_ray.serve.round_server import CHANNEL_OPTIONS
from specdec_ray.serve.wire import (
    WireLimits,
    check_frame,
    decode_reply,
    encode_request,
    session_of_reply,
    split_frames,
)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request under way and the caller that waits for its answer."""

    request: Request
    answer: asyncio.Future[Reply]


class RoundConnection:
    """One stream to one replica. Once broken it stays so; `ConnectionCache` makes another.

    Messages of one turn of the event loop leave as one frame.
    """

    def __init__(self, address: str, limits: WireLimits) -> None:
        self.address = address
        self._limits = limits
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._call: Any = rounds_pb2_grpc.RoundServiceStub(self._channel).Rounds()
        self._pending: dict[bytes, _Pending] = {}
        self._outgoing: list[pb.EngineRequest] = []
        self._waiting = asyncio.Event()
        self._lost: EngineLost | None = None
        self._tasks = [
            asyncio.create_task(self._until_lost(half)) for half in (self._read, self._write)
        ]

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def session(self, session_id: bytes) -> "RemoteSession":
        return RemoteSession(self, session_id)

    def call(self, session_id: bytes, request: Request) -> asyncio.Future[Reply]:
        """Send a request; the future is its reply, and cancelling it gives up waiting.

        Raises (here or from the future):
            EngineLost: the stream is broken, or the reply makes no sense.
            SpecdecError: a request of this session is under way already.
        """
        if self._lost is not None:
            raise EngineLost(str(self._lost))
        under_way = self._pending.get(session_id)
        if under_way is not None and not under_way.answer.done():
            raise SpecdecError("a request of this session is under way")
        self._outgoing.append(encode_request(request))
        self._waiting.set()
        pending = _Pending(request, asyncio.get_running_loop().create_future())
        self._pending[session_id] = pending
        pending.answer.add_done_callback(lambda _: self._forget(session_id, pending))
        return pending.answer

    def _forget(self, session_id: bytes, pending: _Pending) -> None:
        if self._pending.get(session_id) is pending:
            del self._pending[session_id]
        if not pending.answer.cancelled():
            pending.answer.exception()  # its caller may have gone: asyncio would complain

    async def aclose(self) -> None:
        self._fail(EngineLost(f"the connection to {self.address} was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _until_lost(self, half: Callable[[], Awaitable[None]]) -> None:
        """Run one half of the stream; however it ends, nobody goes on waiting. CancelledError only
        means that the connection itself cancelled the stream, once lost."""
        try:
            await half()
        except Exception as error:
            self._fail(EngineLost(f"the stream to {self.address} broke: {_cause(error)}"))
        else:
            self._fail(EngineLost(f"{self.address} ended the stream"))

    async def _write(self) -> None:
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            requests, self._outgoing = self._outgoing, []
            for batch in split_frames(requests, self._limits):
                await self._call.write(pb.RoundsRequest(requests=batch))

    async def _read(self) -> None:
        async for frame in self._call:
            check_frame(frame.replies, self._limits)
            for message in frame.replies:
                self._settle(message)

    def _settle(self, message: pb.EngineReply) -> None:
        pending = self._pending.get(session_of_reply(message))
        if pending is None or pending.answer.done():
            return  # its caller has given up
        try:
            reply = decode_reply(message, self._limits)
        except InvalidParameter as error:
            loss = EngineLost(f"malformed reply of {self.address}: {error}")
            pending.answer.set_exception(loss)
        else:
            if not _is_late(reply, pending.request):
                pending.answer.set_result(reply)

    def _fail(self, loss: EngineLost) -> None:
        if self._lost is not None:
            return
        self._lost = loss
        self._call.cancel()
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(EngineLost(str(loss)))


def _is_late(reply: Reply, request: Request) -> bool:
    """Whether this answers an earlier request of the session, whose caller has given up."""
    if isinstance(reply, Verdict) and isinstance(request, Verify):
        return reply.round < request.round
    if isinstance(reply, Proposal) and isinstance(request, Propose):
        return reply.base_length < request.handle.length + len(request.tokens)
    return False


def _cause(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"


class RemoteSession:
    """A session on a remote engine, as the round loop sees it."""

    def __init__(self, connection: RoundConnection, session_id: bytes) -> None:
        self._connection = connection
        self._session_id = session_id

    @property
    def session_id(self) -> bytes:
        return self._session_id

    def call(self, request: Request) -> asyncio.Future[Reply]:
        return self._connection.call(self._session_id, request)


class ConnectionCache:
    """One live connection per address; lost ones are closed when another one is made."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._connections: dict[str, RoundConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> RoundConnection:
        connection = self._connections.get(address)
        if connection is None or connection.is_lost:
            self._drop_lost()
            connection = self._connections[address] = RoundConnection(address, self._limits)
        return connection

    async def aclose(self) -> None:
        connections, self._connections = self._connections, {}
        await asyncio.gather(*(connection.aclose() for connection in connections.values()))

    def _drop_lost(self) -> None:
        """Close every lost connection: a restarted replica has another address, so nobody would
        ask for the old one again."""
        for address, connection in list(self._connections.items()):
            if connection.is_lost:
                del self._connections[address]
                closing = asyncio.create_task(connection.aclose())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
