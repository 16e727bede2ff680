"""Structured output as clients ask for it, through both front doors."""

import json
import re
from typing import Literal

import grpc
import pytest
from pydantic import BaseModel

from specdec_ray.pb import inference_pb2 as pb
from specdec_ray.pb import inference_pb2_grpc
from specdec_ray.serve.grpc_api import GrpcServer

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["tree", "chain"]}, "depth": {"enum": [1, 2, 3]}},
    "required": ["kind", "depth"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}}
# Random weights love blanks and digits: a bias against them keeps texts short.
TERSE = {"max_tokens": 200, "temperature": 1.0, "seed": 7, "frequency_penalty": 2.0}


def is_shape(text):
    value = json.loads(text)
    return set(value) == {"kind", "depth"} and value["kind"] in ("tree", "chain")


def is_choice(text):
    return text in ("cat", "cow")


FORMS = {
    "response_format": (FORMAT, is_shape),
    "structured_outputs": ({"json": SCHEMA}, is_shape),
    "structured_outputs ": ({"json": json.dumps(SCHEMA)}, is_shape),
    "structured_outputs  ": ({"regex": "[ab]{3}c"}, re.compile("[ab]{3}c").fullmatch),
    "structured_outputs   ": ({"choice": ["cat", "cow"]}, is_choice),
    "structured_outputs    ": ({"grammar": 'root ::= "cat" | "cow"'}, is_choice),
    "guided_json": (SCHEMA, is_shape),
    "guided_regex": ("[ab]{3}c", re.compile("[ab]{3}c").fullmatch),
    "guided_choice": (["cat", "cow"], is_choice),
    "guided_grammar": ('start: "cat" | "cow"', is_choice),
}


@pytest.mark.parametrize("form", list(FORMS))
async def test_the_text_is_what_was_asked_for(client, form):
    value, matches = FORMS[form]
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        n=2,
        extra_body={form.strip(): value},
        **TERSE,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert matches(choice.message.content)


async def test_the_client_parses_models(client):
    class Shape(BaseModel):
        kind: Literal["tree", "chain"]
        depth: Literal[1, 2]

    answer = await client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "x"}], response_format=Shape, **TERSE
    )
    assert isinstance(answer.choices[0].message.parsed, Shape)


async def test_any_object(client):
    for extra in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        answer = await client.completions.create(
            model="tiny", prompt="x", extra_body=extra, **{**TERSE, "max_tokens": 400}
        )
        text = answer.choices[0].text
        assert text.startswith("{")
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


async def test_a_text_as_usual(http):
    for response_format in ({"type": "text"}, None):
        body = {"prompt": "x", "response_format": response_format, "structured_outputs": {}}
        assert (await http.post("/v1/completions", json=body)).status_code == 200


BAD = {
    "a type that is none": ({"response_format": {"type": "xml"}}, "response_format"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "a schema that is none": ({"guided_json": {"type": "foo"}}, "guided_json"),
    "a schema that is no JSON": ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    "a regex that is none": ({"guided_regex": "a(+b"}, "guided_regex"),
    "no choice": ({"guided_choice": []}, "guided_choice"),
    "a grammar that is none": ({"guided_grammar": "root ::= ("}, "guided_grammar"),
    "too long": ({"guided_choice": ["x" * 70_000]}, "guided_choice"),
    "two": ({"guided_choice": ["x"], "guided_regex": "x"}, "guided_choice"),
    "two at once": (
        {"structured_outputs": {"choice": ["x"], "regex": "x"}},
        "structured_outputs.choice",
    ),
    "an unknown key": ({"structured_outputs": {"xml": "x"}}, "structured_outputs"),
}


@pytest.mark.parametrize("case", list(BAD))
async def test_bad_structures_name_the_field(http, case):
    extra, named = BAD[case]
    response = await http.post("/v1/completions", json={"prompt": "x", **extra})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(named)


async def test_a_model_that_cannot_follow_says_so(http, service, monkeypatch):
    monkeypatch.setattr(type(service.model), "grammars", None)
    response = await http.post("/v1/completions", json={"prompt": "x", "guided_regex": "a"})
    assert response.json()["error"]["param"] == "guided_regex"
    assert response.status_code == 400


@pytest.fixture
async def stub(service):
    server = GrpcServer(service)
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)
    await server.stop(0)


@pytest.mark.parametrize(
    ("structure", "matches"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, is_shape),
        ({"regex": "[ab]{3}c"}, re.compile("[ab]{3}c").fullmatch),
        ({"choice": pb.Texts(texts=["cat", "cow"])}, is_choice),
        ({"grammar": 'root ::= "cat" | "cow"'}, is_choice),
    ],
)
async def test_grpc(stub, structure, matches):
    request = pb.GenerationInput(text="x", max_tokens=100, seed=1, frequency_penalty=2, **structure)
    answer = await stub.Generate(pb.GenerateRequest(input=request))
    assert matches(answer.choices[0].text)


@pytest.mark.parametrize(
    "structure",
    [{"json_schema": "{"}, {"regex": "a(+"}, {"choice": pb.Texts()}, {"grammar": "root ::= ("}],
)
async def test_grpc_names_bad_structures(stub, structure):
    request = pb.GenerationInput(text="x", **structure)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Generate(pb.GenerateRequest(input=request))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details().startswith(next(iter(structure)))
