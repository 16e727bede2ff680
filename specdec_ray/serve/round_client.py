"""A router's side of the data plane: one multiplexed stream per engine replica."""

import asyncio
import logging
from typing import Any

import grpc

from specdec_ray.engine.messages import Reply, Request
from specdec_ray.errors import EngineLost, InvalidParameter
from specdec_ray.pb import rounds_pb2 as pb
from specdec_ray.pb import rounds_pb2_grpc
from specdec_ray.serve.round_server import CHANNEL_OPTIONS
from specdec_ray.serve.wire import WireLimits, decode_reply, encode_request, session_of_reply

logger = logging.getLogger("ray.serve")


class RoundConnection:
    """One stream to one replica. Once broken it stays so; `ConnectionCache` makes another.

    Messages of one turn of the event loop leave as one frame.
    """

    def __init__(self, address: str, limits: WireLimits) -> None:
        self.address = address
        self._limits = limits
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._call: Any = rounds_pb2_grpc.RoundServiceStub(self._channel).Rounds()
        self._answers: dict[bytes, asyncio.Future[Reply]] = {}
        self._outgoing: list[pb.EngineRequest] = []
        self._waiting = asyncio.Event()
        self._lost: EngineLost | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def session(self, session_id: bytes) -> "RemoteSession":
        return RemoteSession(self, session_id)

    async def call(self, session_id: bytes, request: Request) -> Reply:
        """Send a request and wait for its reply; a session has one under way at most.

        Raises:
            EngineLost: the stream is broken.
        """
        if self._lost is not None:
            raise self._lost
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._answers[session_id] = answer
        self._outgoing.append(encode_request(request))
        self._waiting.set()
        try:
            return await answer
        finally:
            # A late reply to a caller that gave up finds no one, or the session's next request,
            # whose caller sees that it answers another round.
            if self._answers.get(session_id) is answer:
                del self._answers[session_id]

    async def aclose(self) -> None:
        self._fail(EngineLost(f"the connection to {self.address} was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _write(self) -> None:
        try:
            while True:
                await self._waiting.wait()
                self._waiting.clear()
                frame = pb.RoundsRequest(requests=self._outgoing)
                self._outgoing = []
                await self._call.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            self._fail(self._loss(error))

    async def _read(self) -> None:
        try:
            async for frame in self._call:
                for message in frame.replies:
                    self._settle(message)
            self._fail(EngineLost(f"{self.address} ended the stream"))
        except grpc.RpcError as error:
            self._fail(self._loss(error))

    def _settle(self, message: pb.EngineReply) -> None:
        answer = self._answers.get(session_of_reply(message))
        if answer is None or answer.done():
            return
        try:
            answer.set_result(decode_reply(message, self._limits))
        except InvalidParameter as error:
            answer.set_exception(EngineLost(f"malformed reply of {self.address}: {error}"))

    def _loss(self, error: BaseException) -> EngineLost:
        code = (
            error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
        )
        return EngineLost(f"the stream to {self.address} broke: {code}")

    def _fail(self, loss: EngineLost) -> None:
        if self._lost is None:
            self._lost = loss
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineLost(str(self._lost)))


class RemoteSession:
    """A session on a remote engine, as the round loop sees it."""

    def __init__(self, connection: RoundConnection, session_id: bytes) -> None:
        self._connection = connection
        self._session_id = session_id

    @property
    def session_id(self) -> bytes:
        return self._session_id

    async def call(self, request: Request) -> Reply:
        return await self._connection.call(self._session_id, request)


class ConnectionCache:
    """One live connection per address."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._connections: dict[str, RoundConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> RoundConnection:
        connection = self._connections.get(address)
        if connection is None or connection.is_lost:
            if connection is not None:
                closing = asyncio.create_task(connection.aclose())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            connection = self._connections[address] = RoundConnection(address, self._limits)
        return connection

    async def aclose(self) -> None:
        connections, self._connections = self._connections, {}
        await asyncio.gather(*(connection.aclose() for connection in connections.values()))
