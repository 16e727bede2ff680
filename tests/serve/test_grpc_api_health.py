import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec_ray.pb import inference_pb2 as pb
from specdec_ray.pb import inference_pb2_grpc
from specdec_ray.serve import grpc_api
from specdec_ray.serve.grpc_api import GrpcServer

Status = health_pb2.HealthCheckResponse


async def status_at(port):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest())).status


async def status_becomes(port, status):
    for _ in range(100):
        if await status_at(port) == status:
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"not {status} within 2 s")


@pytest.fixture
def readiness(service, monkeypatch):
    """What the service's readiness check does, changeable."""

    class Readiness:
        async def answer(self):
            return None

    changeable = Readiness()

    async def not_ready_reason():
        return await changeable.answer()

    monkeypatch.setattr(service, "not_ready_reason", not_ready_reason)
    monkeypatch.setattr(grpc_api, "HEALTH_PERIOD_S", 0.02)
    return changeable


async def test_not_serving_until_readiness_is_known(service, readiness):
    known = asyncio.Event()
    readiness.answer = known.wait  # no answer at all
    server = GrpcServer(service)
    port = await server.start("127.0.0.1", 0)
    try:
        assert await status_at(port) == Status.NOT_SERVING
    finally:
        await server.stop(0)


async def test_health_follows_readiness_and_outlives_its_failures(service, readiness):
    async def broken():
        raise ZeroDivisionError

    async def ready():
        return None

    server = GrpcServer(service)
    port = await server.start("127.0.0.1", 0)
    try:
        await status_becomes(port, Status.SERVING)
        readiness.answer = broken
        await status_becomes(port, Status.NOT_SERVING)
        readiness.answer = ready
        await status_becomes(port, Status.SERVING)
    finally:
        await server.stop(0)


async def test_failures_are_logged_with_the_request_id(service, monkeypatch, caplog):
    monkeypatch.setattr(service, "stream", lambda request: 1 / 0)
    server = GrpcServer(service)
    port = await server.start("127.0.0.1", 0)
    given = pb.GenerationInput(text="x", request_id="r-8")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(pb.GenerateRequest(input=given))
    await server.stop(0)
    assert "request r-8 failed" in caplog.text


async def test_a_time_limit_of_the_service_is_a_deadline(service, monkeypatch):
    async def slow(request):
        raise TimeoutError
        yield

    monkeypatch.setattr(service, "stream", slow)
    server = GrpcServer(service)
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Generate(pb.GenerateRequest(input=pb.GenerationInput(text="x")))
    await server.stop(0)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_server_whose_start_failed_can_be_stopped(service):
    server = GrpcServer(service)
    with pytest.raises(RuntimeError):
        await server.start("256.0.0.1", 1)
    await server.stop(0)
