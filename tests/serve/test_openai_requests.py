"""Requests at the edges: odd text, odd numbers, keys that are known but not implemented."""

import json

import httpx
import pytest
from pydantic import ValidationError

from specdec_ray.serve.openai import build_http_app
from specdec_ray.serve.openai.schema import CompletionBody

JSON = {"content-type": "application/json"}
ENDPOINTS = {
    "completions": {"prompt": "x", "max_tokens": 1},
    "chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
}


async def post(http, endpoint, **fields):
    body = json.dumps({**ENDPOINTS[endpoint], **fields})
    return await http.post(f"/v1/{endpoint}", content=body, headers=JSON)


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
async def test_lone_surrogates_are_refused(http, text):
    chat = [{"role": "user", "content": text}]
    assert error_of(await post(http, "completions", prompt=text), 400)["param"] == "prompt"
    assert error_of(await post(http, "completions", prompt=["x", text]), 400)["param"] == "prompt"
    response = await post(http, "chat/completions", messages=chat)
    assert error_of(response, 400)["param"] == "messages"
    body = json.dumps({"prompt": text})
    assert error_of(await http.post("/tokenize", content=body, headers=JSON), 400)
    assert error_of(await post(http, "completions", model=text), 404)["param"] == "model"
    assert (await post(http, "completions", stop=text)).status_code in (200, 400)


@pytest.mark.parametrize("length", [497, 505, 511])
async def test_the_default_limit_shrinks_to_the_room_left(http, length):
    response = await http.post("/v1/completions", json={"prompt": "x" * length, "ignore_eos": True})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == min(16, 512 - length)


@pytest.mark.parametrize("endpoint", list(ENDPOINTS))
async def test_a_drawn_seed_survives_clients_that_read_numbers_as_doubles(http, endpoint):
    for _ in range(8):
        seed = (await post(http, endpoint)).json()["seed"]
        assert int(float(seed)) == seed < 2**53


NEUTRAL = {
    "include_stop_str_in_output": (False, True),
    "skip_special_tokens": (True, False),
    "add_generation_prompt": (True, False),
    "continue_final_message": (False, True),
    "chat_template": (None, "{{ messages }}"),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
    "allowed_token_ids": (None, [1]),
    "tools": ([], [{"type": "function"}]),
    "tool_choice": ("none", "required"),
    "best_of": (1, 2),
}


@pytest.mark.parametrize("key", list(NEUTRAL))
@pytest.mark.parametrize("endpoint", list(ENDPOINTS))
async def test_known_keys_are_refused_unless_they_ask_for_nothing(http, endpoint, key):
    without_effect, with_effect = NEUTRAL[key]
    for value in (without_effect, None):
        response = await post(http, endpoint, **{key: value})
        assert response.status_code == 200, response.text
    error = error_of(await post(http, endpoint, **{key: with_effect}), 400)
    assert (error["param"], error["code"]) == (key, "unsupported_parameter")


@pytest.mark.parametrize(
    "prompt", [[1.5] * 5000, [["x"]] * 5000, [[1, "x"] * 5000], ["x", 1] * 5000]
)
def test_a_long_wrong_prompt_costs_one_fault_per_type(prompt):
    """Not one per item, which for a body of allowed size would hold up the event loop."""
    with pytest.raises(ValidationError) as error:
        CompletionBody.model_validate({"prompt": prompt})
    assert error.value.error_count() <= 4


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"prompt": "\xff"}', b"null", b"[1]", b"", b'"x"']
)
async def test_bodies_that_are_no_request(http, content):
    response = await http.post("/v1/completions", content=content, headers=JSON)
    assert error_of(response, 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x", "model": "other"}),
        ("/detokenize", {"tokens": [1], "model": "other"}),
    ],
)
async def test_tokenizing_checks_the_model(http, path, body):
    assert error_of(await http.post(path, json=body), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("tokens", [["5"], [True], [1.0], [-1], [999]])
async def test_detokenizing_takes_ids_only(http, tokens):
    assert error_of(await http.post("/detokenize", json={"tokens": tokens}), 400)


async def test_every_error_carries_the_request_id(service, monkeypatch):
    def broken(request):
        raise ZeroDivisionError

    monkeypatch.setattr(service, "stream", broken)
    transport = httpx.ASGITransport(build_http_app(service), raise_app_exceptions=False)
    sent = {"x-request-id": "abc", **JSON}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        too_large = b" " * (service.limits.max_body_bytes + 1)
        for content, status in [(b'{"prompt": "x"}', 500), (too_large, 413), (b"{", 400)]:
            response = await http.post("/v1/completions", content=content, headers=sent)
            assert error_of(response, status)
            assert response.headers["x-request-id"] == "abc"


async def test_a_wrong_method_is_told_the_right_ones(http):
    response = await http.get("/v1/completions")
    assert error_of(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_is_named_as_the_client_named_it(http, field):
    body = {"messages": [{"role": "user", "content": "x"}], field: 0}
    response = await http.post("/v1/chat/completions", json=body)
    assert error_of(response, 400)["param"] == field


async def test_failures_are_logged_with_the_request_id(service, monkeypatch, caplog):
    async def broken(request):
        raise ZeroDivisionError
        yield

    monkeypatch.setattr(service, "stream", broken)
    transport = httpx.ASGITransport(build_http_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        await http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "r-7"})
    assert "request r-7 failed" in caplog.text


async def test_request_ids_cannot_forge_log_lines(http):
    for odd in ("a b", "x" * 129, "é", "a;b"):
        response = await http.get("/live", headers={"x-request-id": odd.encode()})
        assert response.headers["x-request-id"] != odd


GUIDELLM = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 3,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
}
AIPERF = {
    "messages": [{"role": "user", "content": "x"}],
    "model": "tiny",
    "stream": True,
    "max_completion_tokens": 3,
    "stream_options": {"include_usage": True},
}
LLM = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "x"}], "seed": 1}


@pytest.mark.parametrize("body", [GUIDELLM, AIPERF, LLM], ids=["guidellm", "aiperf", "llm"])
async def test_bodies_that_benchmarks_send(http, body):
    response = await http.post(
        "/v1/chat/completions",
        json=body,
        headers={"authorization": "Bearer ", "x-correlation-id": "c"},
    )
    assert response.status_code == 200
    chunks = [json.loads(f[6:]) for f in response.text.split("\n\n") if f.startswith("data: {")]
    counts = [c["usage"]["completion_tokens"] for c in chunks if c.get("usage")]
    assert counts == sorted(counts)
    if body is GUIDELLM:
        assert len(counts) == len(chunks)
        assert counts[-1] == 3


async def test_speculation_metrics_hold_what_benchmarks_check(http):
    """The checks of AIPerf, which drops the object when one fails."""
    for k in (0, 2, None):
        body = {**ENDPOINTS["completions"], "max_tokens": 40, "ignore_eos": True, "stop": ["q"]}
        answer = (
            await http.post("/v1/completions", json={**body, "speculative": {"num_tokens": k}})
        ).json()
        metrics = answer["metrics"]["speculative_decoding"]
        histogram = metrics["acceptance_histogram"]
        assert all(type(count) is int for count in histogram)
        assert len(histogram) == metrics["num_spec_tokens"] + 1 == (4 if k is None else k) + 1
        assert sum(histogram) == metrics["num_spec_steps"]
        assert sum(j * c for j, c in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
        assert metrics["num_accepted_draft_tokens"] <= metrics["num_draft_tokens"]
        assert metrics["num_accepted_draft_tokens"] <= answer["usage"]["completion_tokens"]
