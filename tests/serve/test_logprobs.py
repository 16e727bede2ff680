"""Log-probabilities as clients see them."""

import math

import grpc
import pytest
import torch

from specdec_ray.pb import inference_pb2 as pb
from specdec_ray.pb import inference_pb2_grpc
from specdec_ray.serve.grpc_api import GrpcServer

ASK = {"max_tokens": 24, "temperature": 0.9, "seed": 5}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **ASK}


def check_offsets(text, logprobs):
    """Each token that is text stands where it says."""
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if "�" not in token and token != "</s>":
            assert text[offset : offset + len(token)] == token


@pytest.mark.parametrize("n", [1, 3])
async def test_completions(client, n):
    whole = await client.completions.create(model="tiny", prompt="x", n=n, logprobs=3, **ASK)
    for choice in whole.choices:
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) <= 24
        assert all(-100 < value <= 0 for value in logprobs.token_logprobs)
        for token, value, top in zip(
            logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
        ):
            assert top[token] == value
            assert len(top) <= 4
        check_offsets(choice.text, logprobs)
    plain = await client.completions.create(model="tiny", prompt="x", n=n, **ASK)
    assert [c.text for c in plain.choices] == [c.text for c in whole.choices]
    assert {c.logprobs for c in plain.choices} == {None}


async def test_a_stream_has_the_same(client):
    ask = {"model": "tiny", "prompt": "x", "logprobs": 2, **ASK}
    whole = (await client.completions.create(**ask)).choices[0].logprobs
    stream = await client.completions.create(stream=True, **ask)
    parts = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(whole, name)


async def test_chat(client, tokenizer):
    answer = await client.chat.completions.create(
        logprobs=True, top_logprobs=4, extra_body={"return_token_ids": True}, **CHAT
    )
    choice = answer.choices[0]
    content = choice.logprobs.content
    assert len(content) == len(choice.token_ids)
    for entry in content:
        assert len(entry.top_logprobs) == 4
        values = [other.logprob for other in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-6
        assert entry.token == bytes(entry.bytes).decode(errors="replace")
    spelt = b"".join(bytes(entry.bytes) for entry in content)
    ids = [token for token in choice.token_ids if token < 256]
    assert spelt.removesuffix(b"</s>").decode(errors="replace") == tokenizer.decode(ids)


async def test_chat_streams_and_defaults(client):
    stream = await client.chat.completions.create(logprobs=True, stream=True, **CHAT)
    content = [
        entry
        async for chunk in stream
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    whole = await client.chat.completions.create(logprobs=True, **CHAT)
    assert content == whole.choices[0].logprobs.content
    assert {len(entry.top_logprobs) for entry in content} == {0}


async def test_a_stop_string_cuts_them_too(client):
    ask = {"model": "tiny", "prompt": "x", "logprobs": 0, **ASK}
    text = (await client.completions.create(**ask)).choices[0].text
    stop = text[3:5]
    cut = (
        await client.completions.create(stop=stop, extra_body={"return_token_ids": True}, **ask)
    ).choices[0]
    assert cut.finish_reason == "stop"
    assert len(cut.logprobs.tokens) == len(cut.token_ids) < 24


async def test_lm_evals_loglikelihood(client, tokenizer, make_llama):
    """The request of lm-eval's `local-completions`, which slices by these arrays."""
    prompts = [list(tokenizer(text)["input_ids"]) for text in ("A longer context", "x", "ab")]
    answer = await client.completions.create(
        model="tiny", prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(prompt) + 1
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        row = make_llama()(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = row[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
        for own, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
            assert max(top.values()) >= own
        check_offsets(choice.text, logprobs)


async def test_a_streamed_echo_has_them_too(client):
    ask = {"model": "tiny", "prompt": "A context", "logprobs": 2, "echo": True, "n": 2, **ASK}
    whole = await client.completions.create(**ask)
    parts = [[], []]
    async for chunk in await client.completions.create(stream=True, **ask):
        for choice in chunk.choices:
            parts[choice.index].append(choice)
    for choice, own in zip(whole.choices, parts, strict=True):
        assert "".join(part.text for part in own) == choice.text
        for name in ("tokens", "text_offset"):
            streamed = [x for part in own for x in getattr(part.logprobs, name)]
            assert streamed == getattr(choice.logprobs, name)
        first, *values = [x for part in own for x in part.logprobs.token_logprobs]
        assert first is None
        assert values == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


async def test_prompt_logprobs_as_vllm_has_them(client, tokenizer):
    extra = {"prompt_logprobs": 3}
    prompt = "A context"
    choice = (
        await client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **ASK)
    ).choices[0]
    ids = tokenizer(prompt)["input_ids"]
    first, *places = choice.prompt_logprobs
    assert first is None
    assert choice.logprobs is None
    for token, place in zip(ids[1:], places, strict=True):
        assert place[str(token)]["decoded_token"] == tokenizer.decode([token])
        ranks = [at["rank"] for at in place.values() if at["rank"]]
        assert ranks == [1, 2, 3]
        values = [at["logprob"] for at in place.values()]
        assert values == sorted(values, reverse=True)
    chat = await client.chat.completions.create(extra_body=extra, **CHAT)
    assert chat.prompt_logprobs[0] is None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


async def test_processed(client):
    ask = {"model": "tiny", "prompt": "x", "logprobs": 0, **ASK, "temperature": 0.9}
    extra = {"logprobs_mode": "processed_logprobs", "top_k": 1}
    choice = (await client.completions.create(extra_body=extra, **ask)).choices[0]
    assert set(choice.logprobs.token_logprobs) == {0.0}


BAD = {
    "completions": [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
    "chat/completions": [
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
}


@pytest.mark.parametrize("endpoint", list(BAD))
async def test_bad_values_name_the_field(http, endpoint):
    body = {"prompt": "x"} if endpoint == "completions" else {"messages": CHAT["messages"]}
    for extra, field in BAD[endpoint]:
        response = await http.post(f"/v1/{endpoint}", json={**body, **extra})
        assert response.status_code == 400, (extra, response.text)
        assert response.json()["error"]["param"] == field


async def test_grpc(service):
    server = GrpcServer(service)
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        given = pb.GenerationInput(text="x", max_tokens=20, temperature=0, logprobs=2)
        choice = (await stub.Generate(pb.GenerateRequest(input=given))).choices[0]
        assert len(choice.logprobs) == len(choice.token_ids)
        for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
            assert entry.top_ids[0] == token
            assert entry.top_logprobs[0] == entry.logprob
        streamed = [
            entry
            async for message in stub.GenerateStream(pb.GenerateStreamRequest(input=given))
            for entry in message.delta.logprobs
        ]
        assert streamed == list(choice.logprobs)
        given.prompt_logprobs = 1
        given.text = "A context"
        whole = (await stub.Generate(pb.GenerateRequest(input=given))).choices[0]
        assert len(whole.prompt_logprobs) == len(given.text) - 1
        given.logprobs = 21
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Generate(pb.GenerateRequest(input=given))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.value.details().startswith("logprobs")
    await server.stop(0)
