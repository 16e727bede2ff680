"""Log-probabilities in the shapes of both endpoints."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from specdec_ray.serve.service import ServedModel
from specdec_ray.speculation.logprobs import TokenLogprobs

_Utf8 = getincrementaldecoder("utf-8")


def chat_logprobs(
    model: ServedModel, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        own = model.token_bytes(token)
        return {"token": _text(own), "logprob": logprob, "bytes": list(own)}

    content = [
        {
            **entry(token, at.logprob),
            "top_logprobs": [entry(other, logprob) for other, logprob in at.top],
        }
        for token, at in zip(ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    model: ServedModel, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs], count: int
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM defined it: by token id, nothing for the first token."""
    places: list[dict[str, Any] | None] = [None]
    for token, at in zip(prompt[1:], logprobs, strict=True):
        place: dict[str, Any] = {
            str(other): {"logprob": value, "rank": rank, "decoded_token": _spelt(model, other)}
            for rank, (other, value) in enumerate(at.top[:count], start=1)
        }
        # Its rank is not known where it is not among them.
        own = {"logprob": at.logprob, "rank": None, "decoded_token": _spelt(model, token)}
        place.setdefault(str(token), own)
        places.append(place)
    return places


class CompletionLogprobs:
    """`logprobs` of a completion's choice, which says where each token's text begins.

    Args:
        count: most probable tokens to list at each place.
    """

    def __init__(self, model: ServedModel, count: int) -> None:
        self._model = model
        self._count = count
        self._special = frozenset(model.tokenizer.all_special_ids)  # not part of the text
        self._offset = 0
        self._decoder = _Utf8(errors="replace")

    def push(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The object of the next tokens; nothing is known of a prompt's first."""
        tokens = [_spelt(self._model, token) for token in ids]
        offsets = [self._place(token) for token in ids]
        return {
            "tokens": tokens,
            "token_logprobs": [at.logprob if at else None for at in logprobs],
            "top_logprobs": [
                self._top(token, at) if at else None
                for token, at in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _place(self, token: int) -> int:
        """Where the token's text begins; characters that it only completes lie before it."""
        before = self._offset
        if token not in self._special:
            self._offset += len(self._decoder.decode(self._model.token_bytes(token)))
        return max(before, self._offset - len(_spelt(self._model, token)))

    def _top(self, token: str, at: TokenLogprobs) -> dict[str, float]:
        """The token's own is among them, as in the API, so there may be one more than asked for."""
        top = {_spelt(self._model, other): value for other, value in at.top[: self._count]}
        return {**top, token: at.logprob}


def _spelt(model: ServedModel, token: int) -> str:
    return _text(model.token_bytes(token))


def _text(token: bytes) -> str:
    return token.decode(errors="replace")
