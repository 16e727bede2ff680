"""Response objects of both endpoints, whole and streamed."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_ray import __version__
from specdec_ray.rounds.request import GenerationRequest, SpeculationStats
from specdec_ray.rounds.text import Delta
from specdec_ray.serve.openai.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from specdec_ray.serve.service import ServedModel
from specdec_ray.serve.statistics import speculation_metrics
from specdec_ray.speculation.logprobs import TokenLogprobs


@dataclass(slots=True)
class ChoiceState:
    """One choice as it grows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stats: SpeculationStats | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.stats = delta.stats


class Answer:
    """The answer to one request: what is common to its objects, and its choices' state.

    Args:
        chat: whether the objects are chat completions.
        requests: one per choice, in order.
        prompts: number of prompts the choices belong to.
        echoes: text of each choice's prompt, to be repeated before its own; empty for none.
        token_ids: whether choices show their ids.
        prompt_logprobs: most probable tokens to list at each of the prompt's; None for no list.
    """

    def __init__(
        self,
        model: ServedModel,
        requests: Sequence[GenerationRequest],
        *,
        chat: bool,
        prompts: int = 1,
        echoes: Sequence[str] = (),
        token_ids: bool = False,
        prompt_logprobs: int | None = None,
    ) -> None:
        self._chat = chat
        self._token_ids = token_ids
        self._echoes = echoes
        self._model = model
        self._requests = requests
        self._prompt_logprobs = prompt_logprobs
        count = requests[0].params.logprobs
        self._with_logprobs = count is not None
        self._completions = [CompletionLogprobs(model, count or 0) for _ in requests]
        per_prompt = len(requests) // prompts
        self._prompt_tokens = sum(len(request.prompt) for request in requests[::per_prompt])
        self.choices = [ChoiceState() for _ in requests]
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": f"specdec-ray-{__version__}",
            "seed": requests[0].params.seed,
        }

    def whole(self) -> dict[str, Any]:
        """The object of a finished request."""
        body = {
            **self._common,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [self._whole_choice(i, c) for i, c in enumerate(self.choices)],
            "usage": self.usage(),
            "metrics": self.metrics(),
        }
        if self._chat and self._prompt_logprobs is not None:
            body["prompt_logprobs"] = self._of_prompt(0, self._prompt_logprobs)
        return body

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that precede the text: the role of a chat's choices."""
        if not self._chat:
            return []
        role = {"role": "assistant", "content": ""}
        return [self._chunk(self._chat_choice(i, role)) for i in range(len(self.choices))]

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Chunks of one delta: its text, before a completion's first one the echo of the prompt,
        and for a chat's last one an empty delta that ends it."""
        choice = self.choices[index]
        first = not choice.token_ids
        choice.add(delta)
        chunks = []
        if not self._chat:
            if first and self._echoes:
                chunks.append(self._chunk(self._echo(index)))
            return [*chunks, self._chunk(self._text_choice(index, delta.text, delta))]
        if delta.text or delta.token_ids:
            content = self._chat_choice(index, {"content": delta.text}, delta)
            chunks.append(self._chunk({**content, "finish_reason": None}))
        if delta.finish_reason is not None:
            ending = self._chat_choice(index, {})
            chunks.append(self._chunk({**ending, "finish_reason": delta.finish_reason}))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that `include_usage` asks for."""
        return {**self._chunk(None), "usage": self.usage(), "metrics": self.metrics()}

    def usage(self) -> dict[str, Any]:
        completion = sum(len(choice.token_ids) for choice in self.choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def metrics(self) -> dict[str, Any] | None:
        """Speculation statistics, which are defined for a single choice."""
        stats = self.choices[0].stats
        if len(self.choices) != 1 or stats is None:
            return None
        return {"speculative_decoding": speculation_metrics(stats)}

    def _whole_choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        echoed = self._logprobs_of_echo(index)
        logprobs = self._logprobs(index, choice.token_ids, choice.logprobs)
        if logprobs and echoed:
            logprobs = {key: echoed[key] + logprobs[key] for key in logprobs}
        body: dict[str, Any] = {"index": index, "logprobs": logprobs}
        if self._chat:
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            body["text"] = (self._echoes[index] if self._echoes else "") + choice.text
            if self._prompt_logprobs is not None:
                body["prompt_logprobs"] = self._of_prompt(index, self._prompt_logprobs)
        body["finish_reason"] = choice.finish_reason
        body["stop_reason"] = choice.stop_reason
        if self._token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        return {
            **self._common,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": [] if choice is None else [choice],
        }

    def _text_choice(self, index: int, text: str, delta: Delta | None = None) -> dict[str, Any]:
        reason = delta.finish_reason if delta is not None else None
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        return self._with_tokens(choice, delta)

    def _chat_choice(
        self, index: int, content: dict[str, str], delta: Delta | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": content, "logprobs": None, "finish_reason": None}
        return self._with_tokens(choice, delta)

    def _with_tokens(self, choice: dict[str, Any], delta: Delta | None) -> dict[str, Any]:
        if delta is not None:
            choice["logprobs"] = self._logprobs(choice["index"], delta.token_ids, delta.logprobs)
            if self._token_ids:
                choice["token_ids"] = list(delta.token_ids)
        return choice

    def _echo(self, index: int) -> dict[str, Any]:
        choice = self._text_choice(index, self._echoes[index])
        return {**choice, "logprobs": self._logprobs_of_echo(index)}

    def _logprobs_of_echo(self, index: int) -> dict[str, Any] | None:
        if not (self._echoes and self._with_logprobs):
            return None
        logprobs = [None, *self.choices[index].prompt_logprobs]
        return self._completions[index].push(self._requests[index].prompt, logprobs)

    def _of_prompt(self, index: int, count: int) -> list[dict[str, Any] | None]:
        logprobs = self.choices[index].prompt_logprobs
        return prompt_logprobs(self._model, self._requests[index].prompt, logprobs, count)

    def _logprobs(
        self, index: int, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        if self._chat:
            return chat_logprobs(self._model, ids, logprobs)
        return self._completions[index].push(ids, logprobs)
