"""Request bodies. Unknown keys are ignored, as real clients send many; known keys that would
change the output and are not implemented are refused."""

import logging
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdec_ray.errors import InvalidParameter
from specdec_ray.sampling.params import MAX_LOGPROBS
from specdec_ray.serve.openai.structured import StructuredBody
from specdec_ray.serve.requests import DEFAULT_MAX_TOKENS, Message, Options

logger = logging.getLogger("ray.serve")

# Known keys without an implementation, and the values with which they change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "allowed_token_ids": (None, []),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "modalities": (None, ["text"]),
    "audio": (None,),
}
MAX_LOGGED_KEYS = 100  # clients choose the keys: neither log nor memory may grow with them
_logged_keys: set[str] = set()

# One fault is enough: collecting one per item would hold up the event loop for seconds.
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculativeOptions(BaseModel):
    """This service's own extension."""

    model_config = ConfigDict(strict=True, extra="forbid")

    num_tokens: int | None = Field(None, description="k of this request; 0 decodes plainly.")
    rule: str | None = Field(
        None,
        description="Acceptance rule: coupled, rejection, block; typical, which is lossy; or "
        "greedy, which is temperature 0.",
    )


class GenerationBody(StructuredBody):
    """What both endpoints take. null means absent."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Texts | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    speculative: SpeculativeOptions | None = None

    def check_keys(self) -> None:
        """Look at the keys this service does not implement.

        Raises:
            InvalidParameter: a known one asks for something.
        """
        for key, value in (self.model_extra or {}).items():
            if key in UNSUPPORTED:
                if not _among(value, UNSUPPORTED[key]):
                    raise UnsupportedParameter(key, "is not supported")
            elif key not in _logged_keys and len(_logged_keys) < MAX_LOGGED_KEYS:
                _logged_keys.add(key)
                logger.info("ignoring the unknown request key %.64r", key)

    def _options(
        self, max_tokens: int | None, field: str, default: int | None, logprobs: int | None
    ) -> Options:
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameter("prompt_logprobs", "comes with whole answers only, not streamed")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        top_k = -1 if self.top_k is None else self.top_k
        return Options(
            max_tokens=max_tokens,
            max_tokens_field=field,
            default_max_tokens=default,
            temperature=self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if top_k == -1 else top_k,  # -1 keeps all, as in vLLM
            min_p=self.min_p or 0.0,
            seed=self.seed,
            n=1 if self.n is None else self.n,
            stop=tuple(stops or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=_by_id(self.logit_bias or {}),
            bad_words=tuple(self.bad_words or ()),
            min_tokens=self.min_tokens or 0,
            draft_tokens=self.speculative.num_tokens if self.speculative else None,
            rule=self.speculative.rule if self.speculative else None,
            structure=self.structure(),
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            processed_logprobs=self.logprobs_mode == "processed_logprobs",
        )

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def options(self) -> Options:
        options = self._options(self.max_tokens, "max_tokens", DEFAULT_MAX_TOKENS, self.logprobs)
        if not self.echo or self.logprobs is None:
            return options
        return replace(options, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def flat(self) -> Message:
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return Message(self.role, content or "")


Messages = Annotated[list[ChatMessage], Field(fail_fast=True)]


class ChatBody(GenerationBody):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def options(self) -> Options:
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("top_logprobs", "needs logprobs to be true")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        if self.max_completion_tokens is None:
            return self._options(self.max_tokens, "max_tokens", None, logprobs)
        return self._options(self.max_completion_tokens, "max_completion_tokens", None, logprobs)


class TokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: Ids


class UnsupportedParameter(InvalidParameter):
    """A known request field that this service does not implement."""


def _by_id(logit_bias: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings."""
    try:
        return {int(token): bias for token, bias in logit_bias.items()}
    except ValueError:
        raise InvalidParameter("logit_bias", "keys must be token ids") from None


def _among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Membership for which False is no 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
