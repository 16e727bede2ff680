import asyncio
import copy
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import processors

from specdec_ray.config import LimitsConfig
from specdec_ray.errors import EngineLost
from specdec_ray.serve.openai import build_http_app
from specdec_ray.speculation.proposal import Rule

PROMPT = "Speculation is"


@pytest.fixture
def expected(make_llama, greedy_reference, tokenizer):
    """Greedy text of the stock model, up to its first end token."""

    def text(prompt, count):
        ids = greedy_reference(make_llama(), tokenizer(prompt)["input_ids"], count)
        return tokenizer.decode(ids[: ids.index(257)] if 257 in ids else ids)

    return text


async def test_completion(client, expected):
    answer = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0
    )
    assert answer.choices[0].text == expected(PROMPT, 24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 24
    assert answer.id.startswith("cmpl-")
    metrics = answer.model_extra["metrics"]["speculative_decoding"]
    histogram = metrics["acceptance_histogram"]
    assert sum(histogram) == metrics["num_spec_steps"] > 0
    assert sum(j * n for j, n in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
    assert metrics["num_accepted_draft_tokens"] <= metrics["num_draft_tokens"]
    assert len(histogram) == metrics["num_spec_tokens"] + 1 == 5


async def test_streamed_completion_joins_to_the_whole(client, expected):
    stream = await client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected(PROMPT, 24)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert len({c.id for c in chunks}) == 1


async def test_chat(client, expected, tokenizer):
    messages = [{"role": "user", "content": "hello"}]
    answer = await client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=12, temperature=0
    )
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert answer.choices[0].message.content == expected(prompt, 12)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(prompt)


async def test_streamed_chat_has_the_shape_clients_expect(client, http):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    whole = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, seed=5
    )
    stream = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, seed=5, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices[0].delta.content is None


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
async def test_frames_on_the_wire(http, endpoint, n, include_usage):
    body = {"max_tokens": 9, "stream": True, "n": n, "seed": 1}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    if endpoint == "completions":
        body["prompt"] = PROMPT
    else:
        body["messages"] = [{"role": "user", "content": "x"}]
    response = await http.post(f"/v1/{endpoint}", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    assert "data: [DONE]" not in frames
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert sum(reason is not None for reason in reasons) == n
    if include_usage:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] <= 9 * n
        assert all(c["usage"] is None for c in chunks[:-1])
    else:
        assert all("usage" not in c for c in chunks)


async def test_a_seed_repeats_the_text_and_choices_differ(client):
    async def texts(**options):
        answer = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=16, n=3, **options
        )
        return [c.text for c in answer.choices], answer.model_extra["seed"]

    first, seed = await texts()
    assert len(set(first)) == 3
    assert (await texts(seed=seed))[0] == first
    assert (await texts(seed=7))[1] == 7
    plain, _ = await texts(seed=seed, extra_body={"speculative": {"num_tokens": 0}})
    assert plain == first


async def test_prompts_of_every_form(client, tokenizer):
    ids = tokenizer(PROMPT)["input_ids"]
    forms = [PROMPT, [PROMPT], ids, [ids], [PROMPT, PROMPT]]
    texts = []
    for prompt in forms:
        answer = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=8, temperature=0
        )
        texts += [choice.text for choice in answer.choices]
        assert answer.usage.prompt_tokens == len(ids) * len(answer.choices)
    assert len(texts) == 6
    assert len(set(texts)) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_echo_begins_with_the_prompt(http, stream):
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "echo": True, "stream": stream}
    response = await http.post("/v1/completions", json=body)
    if stream:
        frames = [f for f in response.text.split("\n\n") if f and "[DONE]" not in f]
        chunks = [json.loads(f.removeprefix("data: ")) for f in frames]
        text = "".join(c["choices"][0]["text"] for c in chunks)
    else:
        text = response.json()["choices"][0]["text"]
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT)


async def test_stop_and_token_ids_are_cut_at_one_boundary(http, expected, tokenizer):
    stop = expected(PROMPT, 24)[2:5]
    body = {
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0,
        "stop": [stop],
        "return_token_ids": True,
    }
    answer = (await http.post("/v1/completions", json=body)).json()
    choice = answer["choices"][0]
    whole = expected(PROMPT, 24)
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert tokenizer.decode(choice["token_ids"]) == choice["text"] + stop


async def test_bodies_of_real_clients_are_taken(http):
    bodies = [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "x", "name": "n", "extra": 1}],
            "max_completion_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
            "user": "u",
            "opts": {"a": 1},
            "store": False,
            "parallel_tool_calls": True,
            "tools": [],
            "response_format": {"type": "text"},
            "frequency_penalty": 0,
            "logprobs": False,
        },
    ]
    for body in bodies:
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text


LONG = "x" * 600
JSON = {"content-type": "application/json"}
BAD = {
    "not json": (b"{", None, None),
    "no prompt": ({}, "prompt", "missing_required_parameter"),
    "prompt of a wrong type": ({"prompt": 5}, "prompt", None),
    "empty prompt": ({"prompt": ""}, "prompt", None),
    "no prompts": ({"prompt": []}, "prompt", None),
    "an empty prompt among others": ({"prompt": ["a", ""]}, "prompt", None),
    "an empty id list": ({"prompt": [[]]}, "prompt", None),
    "negative id": ({"prompt": [-1]}, "prompt", None),
    "id beyond the vocabulary": ({"prompt": [259]}, "prompt", None),
    "huge id": ({"prompt": [2**40]}, "prompt", None),
    "fractional id": ({"prompt": [1.5]}, "prompt", None),
    "boolean id": ({"prompt": [True]}, "prompt", None),
    "prompt beyond the context": ({"prompt": LONG}, "prompt", "context_length_exceeded"),
    "no room for the completion": (
        {"prompt": "x" * 500, "max_tokens": 13},
        "prompt",
        "context_length_exceeded",
    ),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens", None),
    "max_tokens text": ({"max_tokens": "5"}, "max_tokens", None),
    "max_tokens huge": ({"max_tokens": 10**9}, "max_tokens", None),
    "temperature below": ({"temperature": -1}, "temperature", None),
    "temperature text": ({"temperature": "hot"}, "temperature", None),
    "temperature true": ({"temperature": True}, "temperature", None),
    "top_p 0": ({"top_p": 0}, "top_p", None),
    "top_p above": ({"top_p": 1.01}, "top_p", None),
    "top_k below": ({"top_k": -2}, "top_k", None),
    "min_p above": ({"min_p": 2}, "min_p", None),
    "seed below": ({"seed": -1}, "seed", None),
    "seed huge": ({"seed": 2**63}, "seed", None),
    "n 0": ({"n": 0}, "n", None),
    "n huge": ({"n": 1000}, "n", None),
    "empty stop": ({"stop": ""}, "stop", None),
    "too many stops": ({"stop": ["a"] * 17}, "stop", None),
    "long stop": ({"stop": "a" * 300}, "stop", None),
    "stop of a wrong type": ({"stop": 3}, "stop", None),
    "stop id": ({"stop_token_ids": [999]}, "stop_token_ids", None),
    "k below": ({"speculative": {"num_tokens": -1}}, "draft_tokens", None),
    "unknown rule": ({"speculative": {"rule": "lucky"}}, "rule", None),
    "rule of a wrong type": ({"speculative": {"rule": 3}}, "speculative", None),
    "greedy and warm": ({"speculative": {"rule": "greedy"}, "temperature": 1}, "temperature", None),
    "unknown speculative key": ({"speculative": {"k": 1}}, "speculative", None),
    "best_of": ({"best_of": 3}, "best_of", "unsupported_parameter"),
    "presence_penalty above": ({"presence_penalty": 2.1}, "presence_penalty", None),
    "frequency_penalty text": ({"frequency_penalty": "1"}, "frequency_penalty", None),
    "repetition_penalty 0": ({"repetition_penalty": 0}, "repetition_penalty", None),
    "bias beyond": ({"logit_bias": {"5": 101}}, "logit_bias", None),
    "bias of no id": ({"logit_bias": {"five": 1}}, "logit_bias", None),
    "bias of an unknown id": ({"logit_bias": {"259": 1}}, "logit_bias", None),
    "bias of a list": ({"logit_bias": [5]}, "logit_bias", None),
    "many biases": ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", None),
    "blank bad word": ({"bad_words": ["a", " "]}, "bad_words", None),
    "long bad word": ({"bad_words": ["a" * 65]}, "bad_words", None),
    "many bad words": ({"bad_words": [f"w{n}" for n in range(300)]}, "bad_words", None),
    "min_tokens above max_tokens": ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", None),
    "min_tokens below": ({"min_tokens": -1}, "min_tokens", None),
    "suffix": ({"suffix": "x"}, "suffix", "unsupported_parameter"),
}


@pytest.mark.parametrize("case", list(BAD))
async def test_bad_requests_name_the_field(http, case):
    body, param, code = BAD[case]
    if isinstance(body, dict):
        content = json.dumps({**({} if case == "no prompt" else {"prompt": "x"}), **body})
    else:
        content = body
    response = await http.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["code"] == code
    good = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert good.status_code == 200


async def test_parameters_that_edit_logits(client, tokenizer):
    """Each does what it is documented to do, through the official client."""

    async def ids_of(**extra):
        answer = await client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=24,
            temperature=0,
            extra_body={"return_token_ids": True, **extra},
        )
        return answer.choices[0].model_extra["token_ids"]

    reference = await ids_of()
    banned = tokenizer.decode(reference[2:3])
    assert reference[2] not in await ids_of(logit_bias={str(reference[2]): -100})
    assert set(await ids_of(logit_bias={"65": 100})) == {65}
    assert banned not in tokenizer.decode(await ids_of(bad_words=[banned]))
    assert len(set(await ids_of(frequency_penalty=2, presence_penalty=2))) > 20
    stopped = await ids_of(stop=[banned])
    assert len(stopped) <= 3
    assert len(await ids_of(stop=[banned], min_tokens=10)) >= 10
    ended = await ids_of(stop_token_ids=[reference[1]])
    kept = await ids_of(stop_token_ids=[reference[1]], min_tokens=10)
    assert len(ended) == 1 + reference.index(reference[1])
    assert len(kept) >= 10
    assert reference[1] not in kept[:10]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", '"NaN"'])
async def test_numbers_that_are_none_are_refused_in_valid_json(http, value):
    body = f'{{"prompt": "x", "temperature": {value}}}'
    response = await http.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    json.loads(response.text, parse_constant=lambda name: pytest.fail(name))


async def test_a_context_error_gives_limit_and_length(http):
    response = await http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 1})
    message = response.json()["error"]["message"]
    assert "512" in message
    assert "601" in message


async def test_prompts_at_the_context_limit_work(http):
    for length in (509, 510, 511):
        room = 512 - length
        body = {"prompt": "x" * length, "max_tokens": room, "ignore_eos": True, "temperature": 0}
        answer = (await http.post("/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == room
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_chat_errors(http):
    for body, param in [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ]:
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


async def test_unknown_things_are_not_found(http, client):
    with pytest.raises(openai.NotFoundError) as error:
        await client.completions.create(model="gpt-9", prompt="x")
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"
    for method, path in [("GET", "/v1/nothing"), ("POST", "/v1/embeddings")]:
        response = await http.request(method, path)
        assert response.status_code == 404
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert (await http.get("/v1/completions")).status_code == 405


async def test_models_and_probes(client, http):
    models = (await client.models.list()).data
    assert [m.id for m in models] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    for path in ("/health", "/ready", "/live"):
        response = await http.get(path)
        assert (response.status_code, response.content) == (200, b"")
    assert "version" in (await http.get("/version")).json()


async def test_metrics_count_what_rounds_did(client, http):
    answer = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    told = answer.model_extra["metrics"]["speculative_decoding"]
    text = (await http.get("/metrics")).text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    assert found["specdec_generation_tokens_total"] == 24
    assert found["specdec_num_drafts_total"] == told["num_spec_steps"]
    assert found["specdec_num_draft_tokens_total"] == told["num_draft_tokens"]
    assert found["specdec_num_accepted_tokens_total"] == told["num_accepted_draft_tokens"]
    assert found["specdec_generations_running"] == 0
    assert not any(name.endswith("_created") for name in found)


@pytest.mark.parametrize("rule", [*Rule, "greedy"])
async def test_a_request_names_its_rule(
    client, http, make_llama, greedy_reference, tokenizer, rule
):
    temperature = {} if rule == "greedy" else {"temperature": 0.8}
    answer = await client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=24,
        seed=5,
        **temperature,
        extra_body={"ignore_eos": True, "return_token_ids": True, "speculative": {"rule": rule}},
    )
    ids = answer.choices[0].model_extra["token_ids"]
    assert len(ids) == 24
    if rule == "greedy":
        assert ids == greedy_reference(make_llama(), tokenizer(PROMPT)["input_ids"], 24)
    settled = "coupled" if rule == "greedy" else rule
    lossless = "false" if rule == "typical" else "true"
    counted = f'specdec_generations_total{{lossless="{lossless}",rule="{settled}"}} 1.0'
    assert counted in (await http.get("/metrics")).text


async def test_an_unknown_rule_is_told_the_known_ones(http):
    body = {"model": "tiny", "prompt": PROMPT, "speculative": {"rule": "lucky"}}
    error = (await http.post("/v1/completions", json=body)).json()["error"]
    assert error["message"].endswith(
        "must be one of coupled, rejection, block, typical, greedy, got 'lucky'"
    )


async def test_tokenize_and_back(http):
    answer = (await http.post("/tokenize", json={"prompt": "héllo"})).json()
    assert answer["count"] == len(answer["tokens"]) == 6
    back = await http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "héllo"}


@pytest.mark.parametrize("in_template", [True, False])
async def test_a_chat_has_one_beginning_and_a_completion_too(
    service, http, tokenizer, monkeypatch, in_template
):
    """The template renders the beginning token; the tokenizer must not add another."""
    adding = copy.deepcopy(tokenizer)
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    bos = "{{ bos_token }}" if in_template else ""
    adding.chat_template = bos + tokenizer.chat_template
    monkeypatch.setattr(service, "model", replace(service.model, tokenizer=adding))
    chat = {"messages": [{"role": "user", "content": "x"}]}
    tokens = (await http.post("/tokenize", json=chat)).json()["tokens"]
    assert tokens.count(256) == int(in_template)
    tokens = (await http.post("/tokenize", json={"prompt": "x"})).json()["tokens"]
    assert tokens.count(256) == 1


async def test_request_ids_are_echoed_or_given(http):
    body = {"prompt": "x", "max_tokens": 1}
    given = await http.post("/v1/completions", json=body, headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    odd = await http.post("/v1/completions", json=body, headers={"x-request-id": "a b\x7f"})
    assert odd.headers["x-request-id"] not in ("", "a b\x7f")


async def test_too_large_a_body_is_refused(make_service):
    service = make_service(limits=LimitsConfig(max_body_bytes=1000))
    transport = httpx.ASGITransport(build_http_app(service))

    async def chunks():
        for _ in range(30):
            yield b'{"prompt": "x' + b" " * 100

    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for content in (b" " * 1001, chunks()):
            response = await http.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert "1000" in response.json()["error"]["message"]


async def test_overload_is_refused_early(make_service):
    service = make_service(max_generations=2)
    transport = httpx.ASGITransport(build_http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        responses = await asyncio.gather(
            *(http.post("/v1/completions", json=body) for _ in range(6))
        )
        assert sorted(r.status_code for r in responses) == [200, 200, 429, 429, 429, 429]
        refused = next(r for r in responses if r.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert (await http.get("/health")).status_code == 200
    assert service.active_generations == 0


async def test_failures_before_and_after_the_first_token(service, http, client, monkeypatch):
    plain = service.stream

    async def failing(request, after):
        count = 0
        async for delta in plain(request):
            if count == after:
                raise EngineLost("replica gone")
            count += 1
            yield delta

    monkeypatch.setattr(service, "stream", lambda request: failing(request, 0))
    with pytest.raises(openai.InternalServerError) as error:
        await client.completions.create(model="tiny", prompt="x", max_tokens=30, stream=True)
    assert error.value.status_code == 503
    assert error.value.response.headers["retry-after"]
    monkeypatch.setattr(service, "stream", lambda request: failing(request, 2))
    stream = await client.completions.create(model="tiny", prompt="x", max_tokens=30, stream=True)
    with pytest.raises(openai.APIError, match="no model replica"):
        [chunk async for chunk in stream]
    response = await http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 30, "stream": True}
    )
    frames = response.text.strip().split("\n\n")
    assert "error" in json.loads(frames[-1].removeprefix("data: "))


async def test_health_is_deep_and_life_is_shallow(service, http, monkeypatch):
    @asynccontextmanager
    async def gone():
        raise EngineLost("no target")
        yield

    monkeypatch.setattr(service._targets, "session", gone)
    for path in ("/health", "/ready"):
        response = await http.get(path)
        assert response.status_code == 503
        assert "no target" in response.json()["error"]["message"]
    assert (await http.get("/live")).status_code == 200
    monkeypatch.undo()
    assert (await http.get("/health")).status_code == 200
    assert "specdec_generation_tokens_total 0.0" in (await http.get("/metrics")).text


async def test_what_can_never_fit_is_no_overload(make_service):
    transport = httpx.ASGITransport(build_http_app(make_service(max_generations=2)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


async def test_a_service_that_is_full_is_healthy(make_service):
    service = make_service(max_generations=1)
    transport = httpx.ASGITransport(build_http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        await asyncio.sleep(0.1)
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/v1/completions", json=body)).status_code == 429
        await running


async def test_bugs_show_no_details(service, http, monkeypatch):
    monkeypatch.setattr(service, "stream", lambda request: 1 / 0)
    transport = httpx.ASGITransport(build_http_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert "division" not in response.text
    assert response.json()["error"]["type"] == "server_error"
