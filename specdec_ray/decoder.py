"""The library: target and draft in this process, through the same core, engines and rounds."""

import asyncio
import secrets
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from transformers import PreTrainedTokenizerBase

from specdec_ray.config import Method, parse_config
from specdec_ray.engine.build import BuiltEngine, build_draft, build_target, set_threads
from specdec_ray.engine.sessions import ReplicaIdentity
from specdec_ray.errors import ConfigError, ContextOverflow, InvalidParameter
from specdec_ray.rounds.generate import generate
from specdec_ray.rounds.in_process import InProcessPool
from specdec_ray.rounds.lookup import lookup_pool
from specdec_ray.rounds.request import GenerationRequest, RoundSettings, SpeculationStats
from specdec_ray.rounds.text import Delta, FinishReason, TextStream, stream_text
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.logprobs import TokenLogprobs
from specdec_ray.speculation.proposal import Rule

T = TypeVar("T")
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation.

    Attributes:
        seed: names the text: the same prompt, parameters and seed give it again.
        logprobs: one entry per token, if `logprobs` was given.
        prompt_logprobs: one per token of the prompt but the first, if `prompt_logprobs` was given.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    stats: SpeculationStats
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]


class SpeculativeDecoder:
    """Speculative decoding in one process: prompts in, texts out, several at once.

    Use as a context manager, or call `close`. Safe in notebooks: it runs its own event loop.
    """

    def __init__(
        self,
        target: BuiltEngine,
        draft: BuiltEngine | None,
        settings: RoundSettings,
        method: Method = Method.DRAFT_MODEL,
    ) -> None:
        self._target, self._draft, self._settings = target, draft, settings
        self._targets = InProcessPool(target.thread)
        self._drafts = InProcessPool(draft.thread) if draft is not None else lookup_pool(method)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rounds", daemon=True)
        self._thread.start()

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        draft: str | None = None,
        *,
        method: Method | None = None,
        rule: Rule = Rule.COUPLED,
        draft_tokens: int | None = None,
        tree: Mapping[str, Any] | None = None,
        medusa: Mapping[str, Any] | None = None,
        early_exit: Mapping[str, Any] | None = None,
        threads: int | None = None,
        **engine: Any,
    ) -> Self:
        """Load a pair by Hugging Face ids or folders.

        Args:
            draft: the draft model of method `draft_model`.
            method: what proposes; None is `draft_model` with a draft and `none` without.
            rule, draft_tokens, tree, medusa, early_exit: as in the configuration's `speculation`.
            threads: torch threads of this process; None leaves them.
            engine: fields of `TargetConfig` and `DraftConfig` alike: dtype, device,
                kv_cache_tokens and so on.

        Raises:
            ConfigError: a model cannot be loaded, or the arguments contradict each other.
            UnsupportedModel: a model cannot be served exactly, or the tokenizers differ.
        """
        method = method or (Method.NONE if draft is None else Method.DRAFT_MODEL)
        if (method is Method.DRAFT_MODEL) != (draft is not None):
            raise ConfigError(
                f"a draft goes with method draft_model only, got {method} and {draft!r}"
            )
        config = parse_config(
            {
                "target": {"model": target, **engine},
                "draft": None if draft is None else {"model": draft, **engine},
                "speculation": {
                    "method": method,
                    "rule": rule,
                    "draft_tokens": draft_tokens,
                    "tree": tree,
                    "medusa": medusa,
                    "early_exit": early_exit,
                    "draft_timeout_s": 60,
                },
            }
        )
        if threads is not None:
            set_threads(threads)
        speculation = config.speculation
        identity = ReplicaIdentity("in-process", time.time_ns())
        built_target = build_target(config.target, speculation, identity)
        built_draft = None
        if config.draft is not None:
            built_draft = build_draft(config.draft, config.target, speculation.shape, identity)
        settings = RoundSettings.of(speculation, speculation)
        return cls(built_target, built_draft, settings, method)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._target.tokenizer

    @overload
    def generate(self, prompts: str, **options: Any) -> Generation: ...

    @overload
    def generate(self, prompts: Sequence[Prompt], **options: Any) -> list[Generation]: ...

    def generate(
        self, prompts: str | Sequence[Prompt], **options: Any
    ) -> Generation | list[Generation]:
        """Generate for one prompt or for several at once, each as if alone.

        Args:
            prompts: a text, or a list of texts or id sequences.
            options: max_tokens (128) and any field of `SamplingParams` and `GenerationRequest`;
                temperature is 0 unless given.

        Raises:
            InvalidParameter: a value out of range, an empty prompt, or one that does not fit.
        """
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        requests = [self._request(prompt, **options) for prompt in several]
        generations = self._run(self._gather(requests))
        return generations[0] if isinstance(prompts, str) else generations

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Delta]:
        """Deltas of one generation as its rounds come in. Options as in `generate`."""
        deltas = self._deltas(self._request(prompt, **options))
        ready: SimpleQueue[Delta | BaseException | None] = SimpleQueue()
        ended = threading.Event()

        async def pump() -> None:
            try:
                async with aclosing(deltas):
                    async for delta in deltas:
                        ready.put(delta)
                ready.put(None)
            except Exception as error:  # raised again where the caller reads
                ready.put(error)
            finally:
                ended.set()

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (delta := ready.get()) is not None:
                if isinstance(delta, BaseException):
                    raise delta
                yield delta
        finally:
            pumping.cancel()
            ended.wait()  # what the generation held is free before the caller goes on

    def close(self) -> None:
        """Stop the engines and the event loop."""
        for engine in (self._target, self._draft):
            if engine is not None:
                engine.thread.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _request(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 128,
        stop: Iterable[str] = (),
        stop_token_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        draft_tokens: int | None = None,
        rule: Rule | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        **sampling: Any,
    ) -> GenerationRequest:
        ids = tuple(self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
        if not ids:
            raise InvalidParameter("prompt", "is empty")
        if len(ids) + max_tokens > self._target.context_length:
            needed = len(ids) + max_tokens
            raise ContextOverflow("prompt", self._target.context_length, needed)
        seed = secrets.randbits(63) if seed is None else seed
        request = GenerationRequest(
            prompt=ids,
            params=SamplingParams(temperature=temperature, seed=seed, **sampling),
            max_tokens=max_tokens,
            stop=tuple(stop),
            stop_token_ids=frozenset(stop_token_ids),
            ignore_eos=ignore_eos,
            draft_tokens=self._settings.draft_tokens if draft_tokens is None else draft_tokens,
            rule=rule or self._settings.rule,
        )
        return request.knowing_ends(self._target.end_token_ids)

    def _deltas(self, request: GenerationRequest) -> Any:
        assert request.draft_tokens is not None, "settled by _request"
        text = TextStream(self.tokenizer, request, self._target.end_token_ids, request.draft_tokens)
        return stream_text(generate(request, self._targets, self._drafts, self._settings), text)

    async def _gather(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        tasks = [asyncio.ensure_future(self._finish(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:  # after one failed, the others must have freed what they hold
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _finish(self, request: GenerationRequest) -> Generation:
        deltas = [delta async for delta in self._deltas(request)]
        last = deltas[-1]
        assert last.finish_reason is not None
        assert last.stats is not None
        return Generation(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            finish_reason=last.finish_reason,
            seed=request.params.seed,
            stats=last.stats,
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            prompt_logprobs=deltas[0].prompt_logprobs,
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
