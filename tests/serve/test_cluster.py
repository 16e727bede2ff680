"""The whole service on a real Ray cluster of one node: real proxies, actors, streams, clients."""

import asyncio
import os
import random
import signal
import socket
import tempfile
import time

import grpc
import httpx
import openai
import psutil
import pytest
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from specdec_ray.pb import inference_pb2 as pb
from specdec_ray.pb import inference_pb2_grpc

TOKENS, AT_ONCE = 128, 8
BLOCKS = 16_384 // 16


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def folders(make_llama, tokenizer, tmp_path_factory):
    root = tmp_path_factory.mktemp("cluster")
    for name, options in {"target": {}, "near": {"noise": 0.05}}.items():
        make_llama(**options).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def ports(folders):
    """HTTP and gRPC ports of a running service."""
    http_port, grpc_port = free_port(), free_port()
    os.environ["RAY_SERVE_LOG_TO_STDERR"] = "0"
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as scratch:  # socket paths are short
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=200_000_000,
            _temp_dir=scratch,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": http_port})
        deploy(folders, grpc_port)
        yield http_port, grpc_port
        serve.shutdown()
        ray.shutdown()


def deploy(folders, grpc_port, **router):
    """What `serve run CONFIG` does with a file; `router` goes to its deployment's options."""
    args = {
        "target": {"model": str(folders / "target"), "served_name": "tiny"},
        "draft": {"model": str(folders / "near")},
        "speculation": {"draft_tokens": 4},
        "router": {"grpc_port": grpc_port},
    }
    application = {
        "name": "specdec",
        "route_prefix": "/",
        "import_path": "specdec_ray.serve:build_app",
        "args": args,
        "deployments": [{"name": "Router", **router}] if router else [],
    }
    schema = ServeDeploySchema.model_validate({"applications": [application]})
    _get_global_client().deploy_apps(schema, _blocking=True)


@pytest.fixture
async def client(ports):
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{ports[0]}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture
async def stub(ports):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def statistics(deployment):
    handle = serve.get_deployment_handle(deployment, "specdec")
    found = handle.statistics.remote().result(timeout_s=10)
    return {name: found[name] for name in ("sessions", "waiting", "free_blocks")}


async def assert_free(within_s):
    """All sessions and KV blocks of both engines are free within that time."""
    idle = {"sessions": 0, "waiting": 0, "free_blocks": BLOCKS}
    deadline = time.monotonic() + within_s
    while True:
        found = [await asyncio.to_thread(statistics, name) for name in ("Target", "Draft")]
        if found == [idle, idle] or time.monotonic() > deadline:
            break
    assert found == [idle, idle]


def prompts():
    """Fifty texts of 1 to 200 bytes."""
    rng = random.Random(0)
    words = ["speculative", "é", "decoding", "🙂", "the", "x", "12.5", "\n", "target", "draft"]
    texts = ["a", "Z"]
    while len(texts) < 50:
        text = " ".join(rng.choices(words, k=rng.randint(1, 24)))
        texts.append(text.encode()[: rng.randint(1, 200)].decode(errors="ignore") or "b")
    return texts


async def complete(client, prompt, **options):
    answer = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=TOKENS,
        extra_body={"return_token_ids": True, "ignore_eos": True},
        **options,
    )
    return answer.choices[0].model_extra["token_ids"], answer


async def gathered(work):
    """Run with at most AT_ONCE under way."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(coroutine):
        async with gate:
            return await coroutine

    return await asyncio.gather(*(one(coroutine) for coroutine in work))


async def test_greedy_text_is_the_stock_models(client, make_llama, greedy_reference, tokenizer):
    model, texts = make_llama(), prompts()
    answers = await gathered(complete(client, text, temperature=0) for text in texts)
    for text, (ids, answer) in zip(texts, answers, strict=True):
        assert ids == greedy_reference(model, tokenizer(text)["input_ids"], TOKENS), repr(text)
        metrics = answer.model_extra["metrics"]["speculative_decoding"]
        assert metrics["num_draft_tokens"] > 0
    accepted = sum(
        a.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        for _, a in answers
    )
    assert accepted > 0
    await assert_free(2)


async def test_http_and_grpc_give_one_text_for_a_seed(client, stub):
    ids, _ = await complete(client, "one text", seed=9, temperature=0.8)
    given = pb.GenerationInput(
        text="one text", seed=9, temperature=0.8, max_tokens=TOKENS, ignore_eos=True
    )
    answer = await stub.Generate(pb.GenerateRequest(input=given))
    assert list(answer.choices[0].token_ids) == ids
    streamed = stub.GenerateStream(pb.GenerateStreamRequest(input=given))
    tokens = [t async for m in streamed if m.HasField("delta") for t in m.delta.token_ids]
    assert tokens == ids
    given.draft_tokens = 0
    plain = await stub.Generate(pb.GenerateRequest(input=given))
    assert list(plain.choices[0].token_ids) == ids
    together = await gathered(
        complete(client, "one text", seed=9, temperature=0.8) for _ in range(AT_ONCE)
    )
    assert all(own == ids for own, _ in together)


async def test_a_client_that_leaves_frees_its_caches_within_a_second(client, stub, ports):
    stream = await client.completions.create(
        model="tiny",
        prompt="leaving",
        max_tokens=480,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        break
    await stream.close()
    await assert_free(1)

    body = {"prompt": "leaving", "max_tokens": 480, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=0.15) as http:
        with pytest.raises(httpx.ReadTimeout):  # not streaming, gone in the middle
            await http.post(f"http://127.0.0.1:{ports[0]}/v1/completions", json=body)
    await assert_free(1.5)

    given = pb.GenerationInput(text="leaving", max_tokens=480, ignore_eos=True)
    call = stub.GenerateStream(pb.GenerateStreamRequest(input=given))
    await call.read()
    call.cancel()
    await assert_free(1)


async def test_the_draft_length_changes_without_a_restart(client, folders, ports):
    before = [replica_pids(name) for name in ("Router", "Target", "Draft")]
    settings = {"rule": "coupled", "draft_tokens": 2, "draft_timeout_s": 1.0}
    await asyncio.to_thread(deploy, folders, ports[1], user_config=settings)
    _, answer = await complete(client, "k", temperature=0)
    metrics = answer.model_extra["metrics"]["speculative_decoding"]
    assert metrics["num_spec_tokens"] == 2
    assert [replica_pids(name) for name in ("Router", "Target", "Draft")] == before


async def test_a_killed_draft_costs_speed_only(client, make_llama, greedy_reference, tokenizer):
    text = "the draft dies"
    running = asyncio.create_task(complete(client, text, temperature=0))
    await asyncio.sleep(0.1)
    for pid in replica_pids("Draft"):
        os.kill(pid, signal.SIGKILL)
    ids, _ = await running
    reference = greedy_reference(make_llama(), tokenizer(text)["input_ids"], TOKENS)
    assert ids == reference
    # Serve starts another; meanwhile and afterwards the text is the same.
    assert (await complete(client, text, temperature=0))[0] == reference


def replica_pids(deployment):
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if f"ServeReplica:specdec:{deployment}" in " ".join(process.info["cmdline"] or [])
    }
