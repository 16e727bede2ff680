"""Requests at the edges: odd text, odd numbers, keys that are known but not implemented."""

import json
import time

import httpx
import pytest

from specdec_ray.serve.openai import build_http_app

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
    "logprobs": (None, True),
    "top_logprobs": (0, 5),
    "presence_penalty": (0, 0.5),
    "frequency_penalty": (0.0, -2),
    "repetition_penalty": (1.0, 1.1),
    "min_tokens": (0, 2),
    "logit_bias": ({}, {"5": 1}),
    "tools": ([], [{"type": "function"}]),
    "tool_choice": ("none", "required"),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "best_of": (1, 2),
    "prompt_logprobs": (None, 1),
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


async def test_zero_logprobs_ask_for_the_tokens_own(http):
    """For completions 0 means no alternatives, yet the log-probability of each token."""
    assert error_of(await post(http, "completions", logprobs=0), 400)["param"] == "logprobs"


@pytest.mark.parametrize("value", [[1.5] * 500_000, [["x"]] * 400_000, ["x", 1] * 300_000])
async def test_a_long_wrong_prompt_is_refused_quickly(http, value):
    begun = time.monotonic()
    error = error_of(await post(http, "completions", prompt=value), 400)
    assert error["param"] == "prompt"
    assert time.monotonic() - begun < 20  # checked one by one it takes minutes


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
