"""Routes of the HTTP front door."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.types import Receive

from specdec_ray import __version__
from specdec_ray.errors import InvalidParameter
from specdec_ray.rounds.request import GenerationRequest
from specdec_ray.rounds.text import Delta
from specdec_ray.serve.merge import merge
from specdec_ray.serve.openai.connection import (
    BodyLimit,
    ClientLeft,
    RequestIds,
    while_connected,
)
from specdec_ray.serve.openai.errors import ApiError, api_error, install_handlers
from specdec_ray.serve.openai.responses import Answer
from specdec_ray.serve.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from specdec_ray.serve.openai.sse import DONE, EventStream, frame
from specdec_ray.serve.requests import (
    check_ids,
    check_model,
    choices_of,
    encode_chat,
    encode_text,
)
from specdec_ray.serve.service import GenerationService

CLIENT_LEFT = 499  # nginx's status for it, seen in logs only

Choices = AsyncGenerator[tuple[int, Delta], None]


def build_http_app(service: GenerationService) -> FastAPI:
    """The application in front of a service."""
    app = FastAPI(title="specdec_ray", version=__version__)
    install_handlers(app)
    app.add_middleware(BodyLimit, limit=service.limits.max_body_bytes)
    app.add_middleware(RequestIds)
    _add_generation_routes(app, service)
    _add_model_routes(app, service)
    _add_probes(app, service)
    return app


def _add_generation_routes(app: FastAPI, service: GenerationService) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        _check(service, body)
        options = body.options()
        prompts = await _prompts(service, body.prompt)
        requests = [
            choice
            for prompt in prompts
            for choice in await choices_of(service, prompt, options, "prompt")
        ]
        echoes = []
        if body.echo:
            decode = service.model.tokenizer.decode
            echoes = [decode(choice.prompt, skip_special_tokens=True) for choice in requests]
        answer = Answer(
            service.model,
            requests,
            chat=False,
            prompts=len(prompts),
            echoes=echoes,
            token_ids=bool(body.return_token_ids),
            prompt_logprobs=body.prompt_logprobs,
        )
        return await _answer(service, request.receive, body, requests, answer)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        _check(service, body)
        messages = [message.flat() for message in body.messages]
        prompt = await encode_chat(service, messages, "messages")
        requests = await choices_of(service, prompt, body.options(), "messages")
        answer = Answer(
            service.model,
            requests,
            chat=True,
            token_ids=bool(body.return_token_ids),
            prompt_logprobs=body.prompt_logprobs,
        )
        return await _answer(service, request.receive, body, requests, answer)


def _add_model_routes(app: FastAPI, service: GenerationService) -> None:
    started = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": service.model.name,
            "object": "model",
            "created": started,
            "owned_by": "specdec_ray",
            "max_model_len": service.model.context_length,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(service, name)
        return card()

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        check_model(service, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameter("prompt", "give either prompt or messages")
        if body.messages is not None:
            messages = [message.flat() for message in body.messages]
            ids = await encode_chat(service, messages, "messages")
        else:
            assert body.prompt is not None
            ids = await encode_text(
                service, body.prompt, "prompt", special_tokens=body.add_special_tokens
            )
        return {"tokens": ids, "count": len(ids), "max_model_len": service.model.context_length}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        check_model(service, body.model)
        ids = check_ids(service, body.tokens, "tokens")
        return {"prompt": service.model.tokenizer.decode(ids)}


def _add_probes(app: FastAPI, service: GenerationService) -> None:
    async def ready() -> Response:
        reason = await service.not_ready_reason()
        if reason is None:
            return Response()
        return ApiError(503, reason, "server_error", None, "unavailable", 2).response()

    app.add_api_route("/health", ready, methods=["GET"], response_model=None)
    app.add_api_route("/ready", ready, methods=["GET"], response_model=None)

    @app.get("/live")
    async def live() -> Response:
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return PlainTextResponse(service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _check(service: GenerationService, body: GenerationBody) -> None:
    body.check_keys()
    check_model(service, body.model)


async def _prompts(
    service: GenerationService, prompt: str | list[str] | list[int] | list[list[int]]
) -> list[tuple[int, ...]]:
    """Token ids of each prompt of a completions request."""
    several: Sequence[Any]  # of texts or of id lists
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        several = [prompt]
    else:
        several = list(prompt)
    limit = service.limits.max_prompts
    if not 1 <= len(several) <= limit:
        raise InvalidParameter("prompt", f"must hold 1 to {limit} prompts, got {len(several)}")
    return [
        await encode_text(service, one, "prompt")
        if isinstance(one, str)
        else check_ids(service, one, "prompt")
        for one in several
    ]


async def _answer(
    service: GenerationService,
    receive: Receive,
    body: GenerationBody,
    requests: Sequence[GenerationRequest],
    answer: Answer,
) -> Response:
    limit = service.max_generations
    if len(requests) > limit:
        raise InvalidParameter("n", f"{len(requests)} choices in all, limit is {limit}")
    choices = merge([service.stream(request) for request in requests])
    try:
        if not body.stream:
            await while_connected(receive, _collect(choices, answer))
            return JSONResponse(answer.whole())
        # What fails before the first token gets a status of its own.
        first = await while_connected(receive, anext(choices))
    except ClientLeft:
        await choices.aclose()
        return Response(status_code=CLIENT_LEFT)
    except BaseException:
        await choices.aclose()
        raise
    return EventStream(_frames(first, choices, body, answer), choices)


async def _collect(choices: Choices, answer: Answer) -> None:
    async with aclosing(choices):
        async for index, delta in choices:
            answer.choices[index].add(delta)


async def _frames(
    first: tuple[int, Delta], choices: Choices, body: GenerationBody, answer: Answer
) -> AsyncGenerator[str, None]:
    async with aclosing(choices):
        try:
            for chunk in answer.opening():
                yield frame(_with_usage(chunk, body, answer))
            for chunk in answer.chunks(*first):
                yield frame(_with_usage(chunk, body, answer))
            async for index, delta in choices:
                for chunk in answer.chunks(index, delta):
                    yield frame(_with_usage(chunk, body, answer))
        except Exception as error:  # the status is sent: the stream carries the error, and ends
            yield frame(api_error(error).body)
            return
        if body.wants_usage:
            yield frame(answer.usage_chunk())
        yield DONE


def _with_usage(chunk: dict[str, Any], body: GenerationBody, answer: Answer) -> dict[str, Any]:
    if body.wants_continuous_usage:
        return {**chunk, "usage": answer.usage()}
    return {**chunk, "usage": None} if body.wants_usage else chunk
