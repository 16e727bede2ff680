"""From emitted tokens to text: end tokens, stop strings, the limit.

Everything is cut at one boundary: text, ids, counts and statistics end at the same token.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum

from transformers import PreTrainedTokenizerBase

from specdec_ray.models.detokenizer import Detokenizer
from specdec_ray.rounds.request import Emission, GenerationRequest, SpeculationStats
from specdec_ray.speculation.logprobs import TokenLogprobs


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one round adds to a generation.

    Attributes:
        text: final text; it may lag behind the ids while a character or stop string is open.
        token_ids: kept ids, an end token included.
        finish_reason: set on the last delta only.
        stop_reason: the stop string or token id that ended the text, if one did.
        stats: the generation's speculation statistics, on the last delta only.
        logprobs: one entry per kept id, if they were asked for.
        prompt_logprobs: one per prompt token but the first, in the first delta.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    stats: SpeculationStats | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class StopStrings:
    """Finds stop strings in a stream, holding back only what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Text that is final, and the stop string that ended it."""
        text = self._held + piece
        found = min(
            ((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None
        )
        if found is not None:
            self._held = ""
            return text[: found[0]], found[1]
        keep = max((_open_length(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class TextStream:
    """One generation's tokens on their way to text.

    Args:
        end_token_ids: the model's own end tokens.
        max_draft_tokens: the k that its rounds may reach.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        request: GenerationRequest,
        end_token_ids: frozenset[int],
        max_draft_tokens: int,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, request.prompt)
        self._stops = StopStrings(request.stop)
        self._ends = request.ends(end_token_ids)
        self._room = request.max_tokens
        self._stops_from = request.max_tokens - request.params.min_tokens
        self._stats = SpeculationStats(max_draft_tokens)

    def push(self, emission: Emission) -> Delta:
        """Take the tokens of a round up to the first end among them."""
        pieces: list[str] = []
        kept: list[int] = []
        reason: FinishReason | None = None
        stop: str | int | None = None
        for token in emission.tokens:
            kept.append(token)
            self._room -= 1
            if token in self._ends:
                reason, stop = FinishReason.STOP, token
            else:
                piece = self._detokenizer.push(token)
                if self._room < self._stops_from:  # min_tokens holds stop strings off, too
                    piece, stop = self._stops.push(piece)
                pieces.append(piece)
                if stop is not None:
                    reason = FinishReason.STOP
                elif self._room == 0:
                    reason = FinishReason.LENGTH
            if reason is not None:
                break
        if reason is not None and not isinstance(stop, str):
            piece, late_stop = self._stops.push(self._detokenizer.flush())
            pieces.append(piece)
            if late_stop is not None:
                reason, stop = FinishReason.STOP, late_stop
            else:
                pieces.append(self._stops.flush())
        self._count(emission, len(kept))
        return Delta(
            "".join(pieces),
            tuple(kept),
            reason,
            stop,
            self._stats if reason is not None else None,
            emission.logprobs[: len(kept)],
            emission.prompt_logprobs,
        )

    def _count(self, emission: Emission, kept: int) -> None:
        if emission.proposed:
            self._stats.per_round_proposed.append(emission.proposed)
            self._stats.per_round_accepted.append(min(emission.accepted, kept))


async def stream_text(
    rounds: AsyncGenerator[Emission, None], text: TextStream
) -> AsyncGenerator[Delta, None]:
    """Deltas of a generation; closes its rounds, and with them its sessions, at the end."""
    async with aclosing(rounds):
        async for emission in rounds:
            delta = text.push(emission)
            yield delta
            if delta.finish_reason is not None:
                return


def _open_length(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
