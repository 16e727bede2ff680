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


class CompletionLogprobs:
    """`logprobs` of a completion's choice, which says where each token's text begins."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._special = frozenset(model.tokenizer.all_special_ids)  # not part of the text
        self._offset = 0
        self._decoder = _Utf8(errors="replace")

    def push(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The object of the next tokens."""
        tokens = [self._text(token) for token in ids]
        offsets = [self._place(token) for token in ids]
        return {
            "tokens": tokens,
            "token_logprobs": [at.logprob for at in logprobs],
            # The token's own is among them, as in the API, so there may be one more than asked for.
            "top_logprobs": [
                {**{self._text(other): value for other, value in at.top}, token: at.logprob}
                for token, at in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _place(self, token: int) -> int:
        """Where the token's text begins; characters that it only completes lie before it."""
        before = self._offset
        if token not in self._special:
            self._offset += len(self._decoder.decode(self._model.token_bytes(token)))
        return max(before, self._offset - len(self._text(token)))

    def _text(self, token: int) -> str:
        return _text(self._model.token_bytes(token))


def _text(token: bytes) -> str:
    return token.decode(errors="replace")
