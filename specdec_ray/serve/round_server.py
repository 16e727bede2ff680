"""The data plane of one engine replica: frames of many sessions on few long-lived streams."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specdec_ray.engine.messages import RefusalCode, Refused, Reply, Request
from specdec_ray.engine.outbox import ReplySink
from specdec_ray.errors import InvalidParameter
from specdec_ray.pb import rounds_pb2 as pb
from specdec_ray.pb import rounds_pb2_grpc
from specdec_ray.serve.wire import (
    MAX_FRAME_BYTES,
    WireLimits,
    check_frame,
    decode_request,
    encode_reply,
    session_of_request,
    split_frames,
)

logger = logging.getLogger("ray.serve")

MAX_WAITING_REPLIES = 16_384
SERVICE = "specdec.v1.RoundService"

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]


class Engine(Protocol):
    def submit(self, request: Request, sink: ReplySink) -> None:
        """Queue a request; its one reply goes to `sink`, on the engine's thread."""
        ...


class RoundServer:
    """Serves `RoundService`, health and reflection for one engine.

    Nothing is freed when a stream ends: sessions belong to their leases.
    """

    def __init__(self, engine: Engine, limits: WireLimits) -> None:
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        rounds_pb2_grpc.add_RoundServiceServicer_to_server(
            _RoundService(engine, limits), self._server
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, host: str) -> str:
        """Listen on a free port of `host`; returns the address."""
        port = self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        return f"{host}:{port}"

    async def stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace=None)


class _RoundService(rounds_pb2_grpc.RoundServiceServicer):
    def __init__(self, engine: Engine, limits: WireLimits) -> None:
        self._engine = engine
        self._limits = limits

    async def Rounds(
        self,
        request_iterator: AsyncIterator[pb.RoundsRequest],
        context: grpc.aio.ServicerContext[pb.RoundsRequest, pb.RoundsResponse],
    ) -> None:
        """Read and write until the peer ends the stream or either half fails: a stream that is
        read but no longer written would leave every session on it waiting."""
        stream = _Stream(self._engine, self._limits)
        halves = [
            asyncio.create_task(stream.read(request_iterator)),
            asyncio.create_task(stream.write(context)),
        ]
        try:
            ended, _ = await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            for half in ended:
                half.result()
        except (DecodeError, InvalidParameter) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"malformed frame: {error}")
        finally:
            for half in halves:
                half.cancel()


class _Stream:
    """One router's stream.

    A session has one request under way at most, so a router that keeps to the protocol has no
    more replies waiting than it has sessions. One that neither keeps to it nor reads its replies
    is read no further once MAX_WAITING_REPLIES wait.
    """

    def __init__(self, engine: Engine, limits: WireLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._replies: list[Reply] = []
        self._waiting = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def read(self, frames: AsyncIterator[pb.RoundsRequest]) -> None:
        """Take in frames until the peer ends the stream.

        Raises:
            DecodeError: a frame is no protobuf.
            InvalidParameter: a frame carries too many messages.
        """
        async for frame in frames:
            check_frame(frame.requests, self._limits)
            for message in frame.requests:
                self._take(message)
            await self._room.wait()

    async def write(
        self, context: grpc.aio.ServicerContext[pb.RoundsRequest, pb.RoundsResponse]
    ) -> None:
        """Send what has been answered since the last frame as one frame, for ever."""
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            replies, self._replies = self._replies, []
            self._room.set()
            encoded = [encode_reply(reply) for reply in replies]
            for batch in split_frames(encoded, self._limits):
                await context.write(pb.RoundsResponse(replies=batch))

    def _take(self, message: pb.EngineRequest) -> None:
        """Hand one message to the engine; what cannot be understood is refused by itself."""
        try:
            request = decode_request(message, self._limits)
        except InvalidParameter as error:
            session_id = session_of_request(message)
            logger.warning("malformed message on the data plane: %s", error)
            self._queue([Refused(session_id, RefusalCode.INVALID, str(error))])
        else:
            self._engine.submit(request, self._sink)

    def _sink(self, replies: list[Reply]) -> None:
        """Called on the engine's thread, once per step."""
        self._loop.call_soon_threadsafe(self._queue, replies)

    def _queue(self, replies: list[Reply]) -> None:
        self._replies.extend(replies)
        self._waiting.set()
        if len(self._replies) > MAX_WAITING_REPLIES:
            self._room.clear()
