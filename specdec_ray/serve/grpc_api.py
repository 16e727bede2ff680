"""The gRPC front door: `specdec.v1.InferenceService`, with health and reflection."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specdec_ray.errors import EngineLost, InvalidParameter, Overloaded
from specdec_ray.pb import inference_pb2 as pb
from specdec_ray.pb import inference_pb2_grpc
from specdec_ray.rounds.request import GenerationRequest, SpeculationStats
from specdec_ray.rounds.text import Delta, FinishReason
from specdec_ray.sampling.structure import choice, context_free, json_schema, regex
from specdec_ray.serve.merge import merge
from specdec_ray.serve.requests import (
    DEFAULT_MAX_TOKENS,
    Message,
    Options,
    UnknownModel,
    check_ids,
    check_model,
    choices_of,
    encode_chat,
    encode_text,
    name_request,
    request_id,
)
from specdec_ray.serve.service import GenerationService
from specdec_ray.serve.statistics import speculation_metrics
from specdec_ray.serve.structure import Structure
from specdec_ray.speculation.logprobs import TokenLogprobs

logger = logging.getLogger("ray.serve")

SERVICE = "specdec.v1.InferenceService"
HEALTH_PERIOD_S = 2.0

Context = grpc.aio.ServicerContext[Any, Any]
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_FORMS: dict[str, Callable[[Any], str]] = {
    "json_schema": json_schema,
    "regex": regex,
    "choice": choice,
    "grammar": context_free,
}
_RULES = {
    value: name.removeprefix("ACCEPTANCE_RULE_").lower() if value else None
    for name, value in pb.AcceptanceRule.items()
}


class GrpcServer:
    """The public gRPC server of one router replica."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", service.limits.max_body_bytes)]
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            _InferenceService(service), self._server
        )
        self._health = health.aio.HealthServicer()
        self._watch: asyncio.Task[None] | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Router replicas of one node share it (SO_REUSEPORT)."""
        bound = self._server.add_insecure_port(f"{host}:{port}")
        await self._set_health(serving=False)  # gRPC's own default is SERVING
        await self._server.start()
        self._watch = asyncio.create_task(self._report_health())
        return bound

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and give those under way `grace_s` seconds."""
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def _report_health(self) -> None:
        """Health follows readiness, for the server and for the service."""
        while True:
            try:
                ready = await self._service.not_ready_reason() is None
            except Exception as error:  # the watch must outlive it, or an old answer would stand
                logger.error("the readiness check failed", exc_info=error)
                ready = False
            await self._set_health(serving=ready)
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus.Value(
            "SERVING" if serving else "NOT_SERVING"
        )
        for name in ("", SERVICE):
            await self._health.set(name, status)


class _InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with _errors_as_status(context):
            call = await _Call.of(self._service, request.input)
            async with aclosing(call.deltas()) as deltas:
                async for _ in deltas:
                    pass
            return pb.GenerateResponse(
                id=call.id,
                model=self._service.model.name,
                choices=call.choices,
                usage=call.usage(),
                seed=call.seed,
                speculation=call.speculation(),
            )

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        async with _errors_as_status(context):
            call = await _Call.of(self._service, request.input)
            async with aclosing(call.deltas()) as deltas:
                async for delta in deltas:
                    yield pb.GenerateStreamResponse(id=call.id, delta=delta)
            end = pb.GenerationEnd(
                model=self._service.model.name,
                usage=call.usage(),
                seed=call.seed,
                speculation=call.speculation(),
            )
            yield pb.GenerateStreamResponse(id=call.id, end=end)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        model = self._service.model
        return pb.ListModelsResponse(
            models=[pb.Model(id=model.name, context_length=model.context_length)]
        )


class _Call:
    """One call's choices as they grow."""

    def __init__(
        self, service: GenerationService, requests: list[GenerationRequest], echo: str
    ) -> None:
        self.id = f"gen-{uuid.uuid4().hex}"
        self.seed = requests[0].params.seed
        self.choices = [pb.Choice(index=i, text=echo) for i in range(len(requests))]
        self._service = service
        self._requests = requests
        self._echo = echo
        self._stats: SpeculationStats | None = None

    @classmethod
    async def of(cls, service: GenerationService, given: pb.GenerationInput) -> "_Call":
        """Check the input and make its generation requests.

        Raises:
            InvalidParameter: naming the field.
        """
        name_request(given.request_id)
        check_model(service, given.model)
        kind = given.WhichOneof("prompt")
        if kind == "text":
            prompt = await encode_text(service, given.text, kind)
        elif kind == "token_ids":
            prompt = check_ids(service, given.token_ids.ids, kind)
        elif kind == "chat":
            messages = [Message(m.role, m.content) for m in given.chat.messages]
            prompt = await encode_chat(service, messages, kind)
        else:
            raise InvalidParameter("prompt", "is missing: give text, token_ids or chat")
        requests = await choices_of(service, prompt, _options(given), kind)
        decode = service.model.tokenizer.decode
        echo = decode(prompt, skip_special_tokens=True) if given.echo else ""
        return cls(service, requests, echo)

    async def deltas(self) -> AsyncGenerator[pb.ChoiceDelta, None]:
        """The choices' deltas, added to `choices` on the way."""
        if self._echo:
            for choice in self.choices:
                yield pb.ChoiceDelta(index=choice.index, text=self._echo)
        streams = merge([self._service.stream(request) for request in self._requests])
        async with aclosing(streams):
            async for index, delta in streams:
                yield self._add(index, delta)

    def usage(self) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=len(self._requests[0].prompt),
            completion_tokens=sum(len(choice.token_ids) for choice in self.choices),
        )

    def speculation(self) -> pb.SpeculationStats | None:
        if len(self.choices) != 1 or self._stats is None:
            return None
        return pb.SpeculationStats(**speculation_metrics(self._stats))

    def _add(self, index: int, delta: Delta) -> pb.ChoiceDelta:
        reason = _REASONS[delta.finish_reason] if delta.finish_reason else None
        choice = self.choices[index]
        choice.text += delta.text
        choice.token_ids.extend(delta.token_ids)
        logprobs = [_logprobs(entry) for entry in delta.logprobs]
        choice.logprobs.extend(logprobs)
        prompt_logprobs = [_logprobs(entry) for entry in delta.prompt_logprobs]
        choice.prompt_logprobs.extend(prompt_logprobs)
        if reason is not None:
            choice.finish_reason = reason
        self._stats = delta.stats
        return pb.ChoiceDelta(
            index=index,
            text=delta.text,
            token_ids=delta.token_ids,
            finish_reason=reason,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _logprobs(entry: TokenLogprobs) -> pb.Logprobs:
    return pb.Logprobs(
        logprob=entry.logprob,
        top_ids=[token for token, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
    )


def _options(given: pb.GenerationInput) -> Options:
    def optional(field: str, default: Any) -> Any:
        return getattr(given, field) if given.HasField(field) else default

    return Options(
        max_tokens=optional("max_tokens", None),
        default_max_tokens=None if given.HasField("chat") else DEFAULT_MAX_TOKENS,
        temperature=optional("temperature", None),
        top_k=given.top_k,
        top_p=optional("top_p", 1.0),
        min_p=given.min_p,
        seed=optional("seed", None),
        n=optional("n", 1),
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=optional("repetition_penalty", 1.0),
        logit_bias=dict(given.logit_bias),
        bad_words=tuple(given.bad_words),
        min_tokens=given.min_tokens,
        draft_tokens=optional("draft_tokens", None),
        rule=_RULES.get(given.rule, str(given.rule)),
        structure=_structure(given),
        logprobs=optional("logprobs", None),
        prompt_logprobs=optional("prompt_logprobs", None),
        processed_logprobs=given.processed_logprobs,
    )


def _structure(given: pb.GenerationInput) -> Structure | None:
    kind = given.WhichOneof("structure")
    if not kind:
        return None
    value = getattr(given, kind)
    return Structure(kind, _FORMS[kind], value.texts if kind == "choice" else value)


@asynccontextmanager
async def _errors_as_status(context: Context) -> AsyncIterator[None]:
    """End the call with the status an exception stands for; unexpected ones stay in the log.

    gRPC itself cancels the handler at the client's deadline or when the client leaves, which
    closes the generators and frees what they hold.
    """
    try:
        yield
    except UnknownModel as error:
        await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
    except InvalidParameter as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except Overloaded as error:
        retry = (("retry-after-ms", str(int(1000 * error.retry_after_s))),)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), retry)
    except EngineLost as error:
        logger.warning("request %s: no engine: %s", request_id.get(), error)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no model replica is available")
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request took too long")
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception as error:
        logger.error("request %s failed", request_id.get(), exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error")
