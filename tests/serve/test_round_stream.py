import asyncio
import secrets
import threading
import time

import grpc
import pytest

from specdec_ray.engine.messages import (
    CacheHandle,
    Open,
    Opened,
    RefusalCode,
    Refused,
    Verify,
)
from specdec_ray.errors import EngineLost
from specdec_ray.pb import rounds_pb2 as pb
from specdec_ray.pb import rounds_pb2_grpc
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.serve.round_client import ConnectionCache, RoundConnection
from specdec_ray.serve.round_server import RoundServer
from specdec_ray.serve.wire import WireLimits
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.tree import TokenTree

LIMITS = WireLimits(max_context_tokens=2_000_000)


class EchoEngine:
    """Answers Open after `delay_s`, from another thread, like an engine would."""

    def __init__(self, delay_s=0.0):
        self.delay_s = delay_s
        self.requests = []

    def submit(self, request, sink):
        self.requests.append(request)
        if not isinstance(request, Open):
            return
        handle = CacheHandle(request.session_id, "echo", 1, 0, len(request.tokens))
        reply = [Opened(handle, request.tokens[:1])]
        threading.Timer(self.delay_s, sink, (reply,)).start()


@pytest.fixture
async def echo():
    engine = EchoEngine()
    server = RoundServer(engine, LIMITS)
    address = await server.start("127.0.0.1")
    connection = RoundConnection(address, LIMITS)
    yield engine, server, connection
    await connection.aclose()
    await server.stop()


def opening(tokens=(7,), session_id=None):
    session_id = session_id or secrets.token_bytes(16)
    return Open(session_id, tuple(tokens), SamplingParams(), Rule.COUPLED, 100)


async def call(connection, request):
    return await connection.session(request.session_id).call(request)


async def test_many_sessions_share_the_stream(echo):
    engine, _, connection = echo
    requests = [opening((n,)) for n in range(64)]
    replies = await asyncio.gather(*(call(connection, request) for request in requests))
    for request, reply in zip(requests, replies, strict=True):
        assert reply.handle.session_id == request.session_id
        assert reply.emitted == request.tokens
    assert len(engine.requests) == 64


async def test_messages_of_one_turn_leave_in_one_frame(echo, monkeypatch):
    _, _, connection = echo
    await call(connection, opening())
    frames, plain = [], connection._call.write
    monkeypatch.setattr(connection._call, "write", lambda f: frames.append(f) or plain(f))
    await asyncio.gather(*(call(connection, opening()) for _ in range(20)))
    assert [len(frame.requests) for frame in frames] == [20]


async def test_large_contexts_pass(echo):
    _, _, connection = echo
    reply = await call(connection, opening([100_000] * 1_700_000))  # 5 MB on the wire
    assert reply.handle.length == 1_700_000


async def test_a_malformed_message_is_refused_alone(echo):
    _, _, connection = echo
    bad, good = opening(), opening()
    verify = Verify(CacheHandle(bad.session_id, "", 1, 0, 1), 1, 1, TokenTree.chain([1] * 65))
    refused, opened = await asyncio.gather(
        connection.session(bad.session_id).call(verify), call(connection, good)
    )
    assert isinstance(refused, Refused)
    assert refused.code is RefusalCode.INVALID
    assert isinstance(opened, Opened)


async def test_a_dead_server_is_noticed_at_once(echo):
    engine, server, connection = echo
    await call(connection, opening())
    engine.delay_s = 30
    waiting = asyncio.create_task(call(connection, opening()))
    await asyncio.sleep(0.05)
    await server.stop()
    started = time.monotonic()
    with pytest.raises(EngineLost, match=connection.address):
        await waiting
    assert time.monotonic() - started < 0.5
    with pytest.raises(EngineLost):
        await call(connection, opening())
    assert connection.is_lost


async def test_no_server_is_a_lost_engine():
    connection = RoundConnection("127.0.0.1:1", LIMITS)
    with pytest.raises(EngineLost):
        await call(connection, opening())
    await connection.aclose()


async def test_a_caller_that_gives_up_disturbs_no_one(echo):
    engine, _, connection = echo
    engine.delay_s = 0.1
    request = opening()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await call(connection, request)
    await asyncio.sleep(0.2)  # the late reply finds no one
    engine.delay_s = 0
    assert isinstance(await call(connection, request), Opened)


async def test_the_cache_replaces_a_lost_connection(echo):
    _, _, connection = echo
    cache = ConnectionCache(LIMITS)
    first = cache.get(connection.address)
    assert cache.get(connection.address) is first
    await first.aclose()
    second = cache.get(connection.address)
    assert second is not first
    assert isinstance(await call(second, opening()), Opened)
    await cache.aclose()


async def test_bytes_that_are_no_frame_end_the_stream_only(echo):
    _, _, connection = echo
    async with grpc.aio.insecure_channel(connection.address) as channel:
        raw = channel.stream_stream("/specdec.v1.RoundService/Rounds")
        stream = raw()
        await stream.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
    assert isinstance(await call(connection, opening()), Opened)


async def test_replies_of_one_step_leave_in_one_frame():
    class StepEngine:
        def __init__(self):
            self.sinks = []
            self.all_here = asyncio.Event()

        def submit(self, request, sink):
            self.sinks.append((request, sink))
            if len(self.sinks) == 5:
                self.all_here.set()

    engine = StepEngine()
    server = RoundServer(engine, LIMITS)
    address = await server.start("127.0.0.1")
    async with grpc.aio.insecure_channel(address) as channel:
        stream = rounds_pb2_grpc.RoundServiceStub(channel).Rounds()
        messages = [
            pb.EngineRequest(
                open=pb.Open(
                    session_id=bytes([n]) * 16,
                    tokens=[1],
                    sampling=pb.Sampling(top_p=1),
                    rule=pb.RULE_COUPLED,
                )
            )
            for n in range(5)
        ]
        await stream.write(pb.RoundsRequest(requests=messages))
        await engine.all_here.wait()
        assert len({sink for _, sink in engine.sinks}) == 1
        replies = [
            Opened(CacheHandle(request.session_id, "s", 1, 0, 1), (1,))
            for request, _ in engine.sinks
        ]
        engine.sinks[0][1](replies)
        frame = await stream.read()
        assert len(frame.replies) == 5
        stream.cancel()
    await server.stop()
