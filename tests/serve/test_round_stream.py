import asyncio
import queue
import secrets
import threading
import time
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec_ray.engine.messages import (
    CacheHandle,
    Close,
    Load,
    Open,
    Opened,
    Proposal,
    Propose,
    RefusalCode,
    Refused,
    Verdict,
    Verify,
)
from specdec_ray.errors import EngineLost, SpecdecError
from specdec_ray.pb import rounds_pb2 as pb
from specdec_ray.pb import rounds_pb2_grpc
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.serve import round_server
from specdec_ray.serve.round_client import ConnectionCache, RoundConnection
from specdec_ray.serve.round_server import CHANNEL_OPTIONS, SERVICE, RoundServer
from specdec_ray.serve.wire import WireLimits, encode_reply, encode_request
from specdec_ray.speculation.proposal import DraftProbs, Rule
from specdec_ray.speculation.shape import Budget
from specdec_ray.speculation.tree import ROOT, TokenTree

LIMITS = WireLimits(max_context_tokens=2_000_000)
TREE = TokenTree((5, 6, 7), (ROOT, ROOT, 0))
PROBS = DraftProbs(torch.tensor([[5, 6]] * 3), torch.tensor([[0.25, 0.75]] * 3))


class FakeEngine:
    """Answers on its own thread, all replies of a step to a sink together, like an engine."""

    def __init__(self):
        self.requests = []
        self.opened = set()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def submit(self, request, sink):
        self.requests.append(request)
        self._inbox.put((request, sink))

    def stop(self):
        self.may_answer.set()
        self._inbox.put(None)
        self._thread.join()

    def _run(self):
        while (first := self._inbox.get()) is not None:
            self.may_answer.wait()
            step = [first] + [self._inbox.get() for _ in range(self._inbox.qsize())]
            replies = defaultdict(list)
            for request, sink in (entry for entry in step if entry is not None):
                if not isinstance(request, Close):
                    replies[sink].append(self._answer(request))
            for sink, batch in replies.items():
                sink(batch)
            if None in step:
                return

    def _answer(self, request):
        if isinstance(request, Open):
            self.opened.add(request.session_id)
            return Opened(handle_of(request.session_id, len(request.tokens)), request.tokens[:1])
        session_id = request.handle.session_id
        if session_id not in self.opened:
            return Refused(session_id, RefusalCode.UNKNOWN_SESSION, "no such session here", 3, 0.5)
        if isinstance(request, Propose):
            base = request.handle.length + len(request.tokens)
            return Proposal(handle_of(session_id, base), base, TREE, PROBS)
        return verdict_to(request)


class SilentEngine:
    """Keeps what it is asked; the test answers."""

    def __init__(self):
        self.requests = []
        self.sink = None
        self._arrived = asyncio.Semaphore(0)

    def submit(self, request, sink):
        self.requests.append(request)
        self.sink = sink
        self._arrived.release()

    async def asked(self, count):
        for _ in range(count):
            await self._arrived.acquire()


class Peer(rounds_pb2_grpc.RoundServiceServicer):
    """A replica that answers the first frame with whatever `reply` does."""

    def __init__(self, reply):
        self._reply = reply

    async def Rounds(self, request_iterator, context):
        async for frame in request_iterator:
            await self._reply(frame, context)


def handle_of(session_id, length=1):
    return CacheHandle(session_id, "fake", 1, 0, length)


def verdict_to(verify):
    tokens = (*verify.tree.tokens[:1], 9)
    drafted = len(verify.tree)
    return Verdict(verify.handle, verify.round, drafted, len(tokens) - 1, tokens, Load(2, 30))


def opening(tokens=(7,), session_id=None):
    session_id = session_id or secrets.token_bytes(16)
    return Open(session_id, tuple(tokens), SamplingParams(), Rule.COUPLED, 100)


def frame_of(*requests):
    return pb.RoundsRequest(requests=[encode_request(request) for request in requests])


async def call(connection, request):
    return await connection.session(request.session_id).call(request)


@asynccontextmanager
async def serving(engine, limits=LIMITS):
    server = RoundServer(engine, limits)
    address = await server.start("127.0.0.1")
    connection = RoundConnection(address, limits)
    try:
        yield server, connection
    finally:
        await connection.aclose()
        await server.stop()


@asynccontextmanager
async def connected_to_peer(reply):
    server = grpc.aio.server()
    rounds_pb2_grpc.add_RoundServiceServicer_to_server(Peer(reply), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection = RoundConnection(f"127.0.0.1:{port}", LIMITS)
    try:
        yield connection
    finally:
        await connection.aclose()
        await server.stop(None)


@pytest.fixture
async def engine():
    engine = FakeEngine()
    yield engine
    engine.stop()  # while the loop that it delivers to is open


@pytest.fixture
async def server_and_connection(engine):
    async with serving(engine) as both:
        yield both


@pytest.fixture
def connection(server_and_connection):
    return server_and_connection[1]


@pytest.fixture
def written(connection, monkeypatch):
    """Messages in each frame that the connection sends."""
    sizes, plain = [], connection._call.write
    monkeypatch.setattr(
        connection._call, "write", lambda frame: sizes.append(len(frame.requests)) or plain(frame)
    )
    return sizes


async def test_every_message_crosses_the_stream(engine, connection):
    session_id = secrets.token_bytes(16)
    session = connection.session(session_id)
    opened = await session.call(opening((7, 8), session_id))
    assert opened == Opened(handle_of(session_id, 2), (7,))
    proposal = await session.call(Propose(opened.handle, (1, 2, 3), Budget(5, 5)))
    assert (proposal.base_length, proposal.tree) == (5, TREE)
    assert torch.equal(proposal.draft_probs.probs, PROBS.probs)
    verify = Verify(opened.handle, 1, 5, proposal.tree, proposal.draft_probs)
    verdict = await session.call(verify)
    assert fields(verdict) == fields(verdict_to(verify))
    assert [type(request) for request in engine.requests] == [Open, Propose, Verify]
    assert torch.equal(engine.requests[2].draft_probs.ids, PROBS.ids)


def fields(message):
    return {name: getattr(message, name) for name in message.__slots__}


async def test_an_unknown_session_is_the_engines_to_refuse(connection):
    stranger = handle_of(secrets.token_bytes(16))
    refused = await connection.session(stranger.session_id).call(Verify(stranger, 1, 1, TREE))
    assert refused == Refused(
        stranger.session_id, RefusalCode.UNKNOWN_SESSION, "no such session here", 3, 0.5
    )


async def test_close_reaches_the_engine_and_has_no_reply(engine, connection):
    session_id = secrets.token_bytes(16)
    async with grpc.aio.insecure_channel(connection.address) as channel:
        stream = rounds_pb2_grpc.RoundServiceStub(channel).Rounds()
        await stream.write(frame_of(Close(session_id), opening()))
        frame = await stream.read()
        assert [reply.WhichOneof("reply") for reply in frame.replies] == ["opened"]
        stream.cancel()
    assert engine.requests[0] == Close(session_id)


async def test_many_sessions_share_the_stream(engine, connection, written):
    async def live(first):
        opened = await call(connection, opening((first,)))
        session = connection.session(opened.handle.session_id)
        for number in range(1, 6):
            verdict = await session.call(Verify(opened.handle, number, number, TREE))
            assert (verdict.handle, verdict.round) == (opened.handle, number)
        return opened.emitted

    emitted = await asyncio.gather(*(live(first) for first in range(64)))
    assert emitted == [(first,) for first in range(64)]
    assert sum(written) == len(engine.requests) == 64 * 6
    assert len(written) < 64 * 6 / 4


async def test_messages_of_one_turn_leave_in_one_frame(connection, written):
    await call(connection, opening())
    await asyncio.gather(*(call(connection, opening()) for _ in range(20)))
    assert written == [1, 20]


async def test_replies_of_one_step_leave_in_one_frame():
    engine = SilentEngine()
    async with serving(engine) as (_, connection):
        channel = grpc.aio.insecure_channel(connection.address)
        stream = rounds_pb2_grpc.RoundServiceStub(channel).Rounds()
        await stream.write(frame_of(*(opening() for _ in range(5))))
        await engine.asked(5)
        engine.sink([Opened(handle_of(asked.session_id), (1,)) for asked in engine.requests])
        assert len((await stream.read()).replies) == 5
        stream.cancel()
        await channel.close()


async def test_frames_keep_to_the_limits_of_the_peer(engine):
    async with serving(engine, replace(LIMITS, max_messages_per_frame=8)) as (_, connection):
        replies = await asyncio.gather(*(call(connection, opening()) for _ in range(50)))
        assert all(isinstance(reply, Opened) for reply in replies)


async def test_large_contexts_pass(connection):
    reply = await call(connection, opening([100_000] * 1_700_000))  # 5 MB on the wire
    assert reply.handle.length == 1_700_000


async def test_large_contexts_of_many_sessions_pass_at_once(connection, written):
    replies = await asyncio.gather(
        *(call(connection, opening([100_000] * 1_000_000)) for _ in range(8))  # 24 MB together
    )
    assert all(isinstance(reply, Opened) for reply in replies)
    assert len(written) > 1


async def test_a_malformed_message_is_refused_alone(connection):
    bad, good = opening(), opening()
    verify = Verify(handle_of(bad.session_id), 1, 1, TokenTree.chain([1] * 65))
    refused, opened = await asyncio.gather(
        connection.session(bad.session_id).call(verify), call(connection, good)
    )
    assert isinstance(refused, Refused)
    assert refused.code is RefusalCode.INVALID
    assert isinstance(opened, Opened)


@pytest.mark.parametrize(
    "frame",
    [b"\xff\xff\xff", pb.RoundsRequest(requests=[pb.EngineRequest()] * 4097).SerializeToString()],
    ids=["no protobuf", "too many messages"],
)
async def test_a_malformed_frame_ends_its_own_stream_only(connection, frame):
    async with grpc.aio.insecure_channel(connection.address) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/Rounds")()
        await stream.write(frame)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(await call(connection, opening()), Opened)


async def test_a_peer_that_reads_nothing_is_read_no_further(monkeypatch):
    class RefusingEngine:
        def submit(self, request, sink):
            sink([Refused(request.session_id, RefusalCode.UNKNOWN_SESSION, "x" * 1000)])

    monkeypatch.setattr(round_server, "MAX_WAITING_REPLIES", 1000)
    frame = frame_of(*(opening() for _ in range(1000)))
    async with serving(RefusingEngine()) as (_, connection):
        channel = grpc.aio.insecure_channel(connection.address, options=CHANNEL_OPTIONS)
        stream = rounds_pb2_grpc.RoundServiceStub(channel).Rounds()
        blocked, frames = False, 0
        while not blocked and frames < 1000:  # 1 GB of replies
            writing = asyncio.ensure_future(stream.write(frame))
            frames += 1
            blocked = not (await asyncio.wait([writing], timeout=0.5))[0]
        assert blocked
        replies = 0
        async with asyncio.timeout(30):
            while replies < 1000 * frames:  # and once it reads, nothing has been lost
                replies += len((await stream.read()).replies)
            await writing
        stream.cancel()
        await channel.close()


async def test_a_dead_server_is_noticed_at_once(engine, server_and_connection):
    server, connection = server_and_connection
    await call(connection, opening())
    engine.may_answer.clear()
    waiting = [asyncio.create_task(call(connection, opening())) for _ in range(3)]
    await asyncio.sleep(0.05)
    started = time.monotonic()
    stopping = asyncio.create_task(server.stop())
    for task in waiting:
        with pytest.raises(EngineLost, match=f"{connection.address} broke: [A-Z]+: "):
            await task
    assert time.monotonic() - started < 0.1
    with pytest.raises(EngineLost):
        await call(connection, opening())
    assert connection.is_lost
    await stopping


async def test_no_server_is_a_lost_engine():
    connection = RoundConnection("127.0.0.1:1", LIMITS)
    with pytest.raises(EngineLost, match="UNAVAILABLE"):
        await call(connection, opening())
    await connection.aclose()


async def test_a_reply_that_cannot_be_encoded_ends_the_stream():
    engine = SilentEngine()
    async with serving(engine) as (_, connection):
        waiting = asyncio.create_task(call(connection, opening()))
        await engine.asked(1)
        engine.sink([Opened(handle_of(engine.requests[0].session_id, -1), ())])
        with pytest.raises(EngineLost):
            await waiting


async def _cancelled(frame, context):
    await context.abort(grpc.StatusCode.CANCELLED, "by the peer")


async def _too_many_replies(frame, context):
    await context.write(pb.RoundsResponse(replies=[pb.EngineReply()] * 4097))


@pytest.mark.parametrize("reply", [_cancelled, _too_many_replies])
async def test_however_the_peer_breaks_the_stream_no_call_goes_on_waiting(reply):
    async with connected_to_peer(reply) as connection:
        with pytest.raises(EngineLost, match=connection.address):
            await call(connection, opening())
        assert connection.is_lost


async def test_a_malformed_reply_fails_its_own_call_only():
    async def short_verdict(frame, context):
        for message in frame.requests:
            if message.WhichOneof("request") == "verify":
                reply = pb.EngineReply(verdict=pb.Verdict(handle=message.verify.handle, accepted=4))
            else:
                reply = encode_reply(Opened(handle_of(message.open.session_id), (1,)))
            await context.write(pb.RoundsResponse(replies=[reply]))

    handle = handle_of(secrets.token_bytes(16))
    async with connected_to_peer(short_verdict) as connection:
        with pytest.raises(EngineLost, match="malformed reply"):
            await connection.session(handle.session_id).call(Verify(handle, 1, 1, TREE))
        assert isinstance(await call(connection, opening()), Opened)


async def test_a_session_has_one_request_under_way(engine, connection):
    engine.may_answer.clear()
    request = opening()
    first = asyncio.create_task(call(connection, request))
    await asyncio.sleep(0)
    with pytest.raises(SpecdecError, match="under way"):
        await call(connection, request)
    engine.may_answer.set()
    assert isinstance(await first, Opened)


async def test_a_request_that_cannot_be_encoded_leaves_the_session_usable(connection):
    request = opening()
    with pytest.raises(ValueError):
        await call(connection, replace(request, tokens=(-1,)))
    assert isinstance(await call(connection, request), Opened)


async def test_a_caller_that_gives_up_disturbs_no_one(engine, connection):
    engine.may_answer.clear()
    request, other = opening(), opening()
    waiting = asyncio.create_task(call(connection, other))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await call(connection, request)
    engine.may_answer.set()  # the late reply finds no one
    assert isinstance(await waiting, Opened)
    assert isinstance(await call(connection, request), Opened)


HANDLE = handle_of(b"s" * 16, 4)
TURNS = {
    "verify": (
        [Verify(HANDLE, number, 4 + number, TREE) for number in (1, 2)],
        [Verdict(HANDLE, number, 0, 0, (1,), Load()) for number in (1, 2)],
    ),
    "propose": (
        [Propose(HANDLE, (1,) * number, Budget(5, 5)) for number in (1, 2)],
        [Proposal(HANDLE, 4 + number, TREE) for number in (1, 2)],
    ),
}


@pytest.mark.parametrize("kind", list(TURNS))
async def test_a_late_reply_is_not_taken_for_the_next_one(kind):
    requests, replies = TURNS[kind]
    engine = SilentEngine()
    async with serving(engine) as (_, connection):
        session = connection.session(HANDLE.session_id)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await session.call(requests[0])
        await engine.asked(1)
        second = session.call(requests[1])
        await engine.asked(1)
        engine.sink(replies)
        assert fields(await second) == fields(replies[1])


async def test_the_cache_replaces_a_lost_connection(connection):
    cache = ConnectionCache(LIMITS)
    first = cache.get(connection.address)
    assert cache.get(connection.address) is first
    await first.aclose()
    second = cache.get(connection.address)
    assert second is not first
    assert isinstance(await call(second, opening()), Opened)
    await cache.aclose()


async def test_the_cache_keeps_no_connection_to_a_replica_that_is_gone(connection):
    cache = ConnectionCache(LIMITS)
    gone = cache.get("127.0.0.1:1")
    with pytest.raises(EngineLost):
        await call(gone, opening())
    cache.get(connection.address)
    assert list(cache._connections) == [connection.address]
    await cache.aclose()


async def test_health_names_the_service(connection):
    async with grpc.aio.insecure_channel(connection.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
