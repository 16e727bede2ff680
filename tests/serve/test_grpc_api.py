import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from specdec_ray.errors import EngineLost
from specdec_ray.pb import inference_pb2 as pb
from specdec_ray.pb import inference_pb2_grpc
from specdec_ray.serve.grpc_api import SERVICE, GrpcServer

PROMPT = "Speculation is"


@pytest.fixture
async def address(service):
    server = GrpcServer(service)
    yield f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.stop(0)


@pytest.fixture
async def channel(address):
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return inference_pb2_grpc.InferenceServiceStub(channel)


def given(**fields):
    return pb.GenerationInput(**{"text": PROMPT, "max_tokens": 20, "temperature": 0, **fields})


async def test_generate_and_stream_agree(stub, make_llama, greedy_reference, tokenizer):
    whole = await stub.Generate(pb.GenerateRequest(input=given(ignore_eos=True)))
    reference = greedy_reference(make_llama(), tokenizer(PROMPT)["input_ids"], 20)
    choice = whole.choices[0]
    assert list(choice.token_ids) == reference
    assert choice.finish_reason == pb.FINISH_REASON_LENGTH
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 20)
    assert whole.speculation.num_spec_steps == sum(whole.speculation.acceptance_histogram) > 0
    request = pb.GenerateStreamRequest(input=given(ignore_eos=True))
    messages = [message async for message in stub.GenerateStream(request)]
    deltas = [m.delta for m in messages if m.HasField("delta")]
    assert "".join(d.text for d in deltas) == choice.text
    assert deltas[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert messages[-1].end.usage == whole.usage
    assert messages[-1].end.speculation == whole.speculation
    assert [m.HasField("end") for m in messages].count(True) == 1


async def test_seeds_and_choices(stub):
    request = pb.GenerateRequest(input=given(temperature=1, n=3, max_tokens=12))
    first = await stub.Generate(request)
    assert len({c.text for c in first.choices}) == 3
    assert not first.HasField("speculation")
    request.input.seed = first.seed
    again = await stub.Generate(request)
    assert [c.text for c in again.choices] == [c.text for c in first.choices]


async def test_every_kind_of_prompt(stub, tokenizer):
    ids = pb.TokenIds(ids=tokenizer(PROMPT)["input_ids"])
    by_ids = pb.GenerationInput(token_ids=ids, max_tokens=8, temperature=0)
    texts = [
        (await stub.Generate(pb.GenerateRequest(input=one))).choices[0].text
        for one in (given(max_tokens=8), by_ids)
    ]
    assert texts[0] == texts[1]
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    answer = await stub.Generate(
        pb.GenerateRequest(input=pb.GenerationInput(chat=chat, max_tokens=4))
    )
    assert answer.usage.completion_tokens <= 4
    echoed = await stub.Generate(pb.GenerateRequest(input=given(echo=True)))
    assert echoed.choices[0].text.startswith(PROMPT)


BAD = {
    "no prompt": (pb.GenerationInput(), "prompt"),
    "empty text": (pb.GenerationInput(text=""), "text"),
    "no ids": (pb.GenerationInput(token_ids=pb.TokenIds()), "token_ids"),
    "ids": (pb.GenerationInput(token_ids=pb.TokenIds(ids=[999])), "token_ids"),
    "no messages": (pb.GenerationInput(chat=pb.Chat()), "chat"),
    "long": (pb.GenerationInput(text="x" * 600), "512"),
    "max_tokens": (given(max_tokens=0), "max_tokens"),
    "temperature": (given(temperature=-1), "temperature"),
    "nan": (given(temperature=float("nan")), "temperature"),
    "top_p": (given(top_p=0), "top_p"),
    "seed": (given(seed=2**63), "seed"),
    "n": (given(n=0), "n"),
    "stop": (given(stop=[""]), "stop"),
    "rule": (given(rule=77), "rule: must be one of coupled, rejection, block, typical, greedy"),
    "greedy": (given(rule=pb.ACCEPTANCE_RULE_GREEDY, temperature=1), "temperature"),
    "draft_tokens": (given(draft_tokens=65), "draft_tokens"),
    "presence_penalty": (given(presence_penalty=3), "presence_penalty"),
    "frequency_penalty": (given(frequency_penalty=float("nan")), "frequency_penalty"),
    "repetition_penalty": (given(repetition_penalty=0), "repetition_penalty"),
    "logit_bias": (given(logit_bias={5: 101}), "logit_bias"),
    "logit_bias id": (given(logit_bias={999: 1}), "logit_bias"),
    "bad_words": (given(bad_words=[""]), "bad_words"),
    "min_tokens": (given(min_tokens=1000), "min_tokens"),
}


@pytest.mark.parametrize("case", list(BAD))
async def test_bad_requests_name_the_field(stub, case):
    request, named = BAD[case]
    for call in (
        stub.Generate(pb.GenerateRequest(input=request)),
        stub.GenerateStream(pb.GenerateStreamRequest(input=request)).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in error.value.details()


async def test_a_request_names_its_rule(stub, service):
    for name, value in pb.AcceptanceRule.items():
        request = given(max_tokens=8, rule=value, temperature=0.8, ignore_eos=True)
        if name == "ACCEPTANCE_RULE_GREEDY":
            request.ClearField("temperature")
        answer = await stub.Generate(pb.GenerateRequest(input=request))
        assert len(answer.choices[0].token_ids) == 8
    metrics = service.metrics.text()
    for rule, count in [("coupled", 3), ("rejection", 1), ("block", 1)]:
        assert f'lossless="true",rule="{rule}"}} {count}.0' in metrics
    assert 'lossless="false",rule="typical"} 1.0' in metrics


async def test_parameters_that_edit_logits(stub):
    edits = {
        "logit_bias": ({65: 100}, lambda ids: set(ids) == {65}),
        "frequency_penalty": (2, lambda ids: len(set(ids)) > 20),
        "repetition_penalty": (100, lambda ids: len(set(ids)) > 20),
    }
    for field, (value, holds) in edits.items():
        request = given(max_tokens=24, temperature=0, **{field: value})
        answer = await stub.Generate(pb.GenerateRequest(input=request))
        assert holds(answer.choices[0].token_ids)


async def test_unknown_model(stub):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Generate(pb.GenerateRequest(input=given(model="other")))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_overload_and_loss_have_their_status(stub, service, monkeypatch):
    monkeypatch.setattr(service, "max_generations", 0)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Generate(pb.GenerateRequest(input=given()))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.value.trailing_metadata())["retry-after-ms"] == "1000"

    async def lost(request):
        raise EngineLost("secret address")
        yield

    monkeypatch.setattr(service, "stream", lost)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Generate(pb.GenerateRequest(input=given()))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "secret" not in error.value.details()


async def test_bugs_show_no_details(stub, service, monkeypatch):
    monkeypatch.setattr(service, "stream", lambda request: 1 / 0)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Generate(pb.GenerateRequest(input=given()))
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert "division" not in error.value.details()


async def test_a_deadline_and_a_cancel_free_everything(stub, service):
    long = given(max_tokens=480, ignore_eos=True)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Generate(pb.GenerateRequest(input=long), timeout=0.1)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    call = stub.GenerateStream(pb.GenerateStreamRequest(input=long))
    await call.read()
    assert service.active_generations >= 1
    call.cancel()
    for _ in range(100):
        if service.active_generations == 0:
            break
        await asyncio.sleep(0.01)
    assert service.active_generations == 0


async def test_health_models_and_reflection(stub, channel, address):
    await asyncio.sleep(0.2)
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    models = await stub.ListModels(pb.ListModelsRequest())
    assert [(m.id, m.context_length) for m in models.models] == [("tiny", 512)]

    def reflect():
        with grpc.insecure_channel(address) as plain:
            return ProtoReflectionDescriptorDatabase(plain).get_services()

    assert SERVICE in await asyncio.to_thread(reflect)
