"""Clients that leave, at every moment of a request: what they asked for ends at once."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
import uvicorn

from specdec_ray.rounds.text import Delta, FinishReason
from specdec_ray.serve.openai import build_http_app

BODIES = {
    "completions": {"prompt": "x"},
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
ENDLESS = 10_000


class Streams:
    """Scripted generations that count themselves."""

    def __init__(self, first_delay_s=0.0, deltas=ENDLESS):
        self.first_delay_s, self.deltas = first_delay_s, deltas
        self.begun = self.ended = self.sent = 0

    async def __call__(self, request):
        self.begun += 1
        try:
            await asyncio.sleep(self.first_delay_s)
            for count in range(self.deltas):
                self.sent += 1
                last = count == self.deltas - 1
                yield Delta("x", (120,), FinishReason.LENGTH if last else None)
                await asyncio.sleep(0.005)
        finally:
            self.ended += 1


@asynccontextmanager
async def listening(app):
    """A real server on loopback; its port."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await serving


async def post(port, path, body):
    """The streams of a connection on which a request was just sent."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return reader, writer


async def until(condition):
    for _ in range(150):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("not within 1.5 s")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("endpoint", list(BODIES))
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["before the first token", "between tokens"])
async def test_a_client_that_leaves_ends_its_generations(
    service, monkeypatch, moment, stream, endpoint, n
):
    streams = Streams(first_delay_s=60 if moment == "before the first token" else 0)
    monkeypatch.setattr(service, "stream", streams)
    async with listening(build_http_app(service)) as port:
        _, writer = await post(port, endpoint, {**BODIES[endpoint], "stream": stream, "n": n})
        await until(lambda: streams.begun == n and (streams.first_delay_s or streams.sent > 3 * n))
        assert streams.ended == 0
        writer.close()
        await until(lambda: streams.ended == n)


@pytest.mark.parametrize("endpoint", list(BODIES))
async def test_a_client_that_is_gone_when_the_answer_starts(service, monkeypatch, endpoint):
    streams = Streams()
    monkeypatch.setattr(service, "stream", streams)
    body = json.dumps({**BODIES[endpoint], "stream": True}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "path": f"/v1/{endpoint}",
        "raw_path": b"",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": ("x", 80),
    }

    async def receive():
        if receive.first:
            receive.first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.Future()

    async def send(message):
        raise OSError("connection lost")

    receive.first = True
    failure = None
    try:
        await build_http_app(service)(scope, receive, send)
    except Exception as error:  # held, so that no garbage collection can close anything
        failure = error
    assert failure is not None
    assert (streams.begun, streams.ended) == (1, 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_serves_requests_one_after_the_other(service, monkeypatch, stream):
    monkeypatch.setattr(service, "stream", Streams(deltas=3))
    async with listening(build_http_app(service)) as port:
        reader, writer = await post(port, "completions", {"prompt": "x", "stream": stream})
        end = b"0\r\n\r\n" if stream else b"}"
        first = await reader.readuntil(end)
        content = b'{"prompt": "x", "max_tokens": 1}'
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        second = await reader.readuntil(b"HTTP/1.1 200") if stream else first
        assert b"200" in first
        assert second
        writer.close()
