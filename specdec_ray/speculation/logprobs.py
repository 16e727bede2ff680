"""Log-probabilities of tokens, always the target's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from specdec_ray.speculation.acceptance import Judgement
from specdec_ray.speculation.batches import RowGroup

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot spell


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the target's probabilities at one token's place.

    Attributes:
        logprob: of the token.
        top: ids of the most probable tokens with theirs, most probable first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def emitted_logprobs(
    logits: torch.Tensor,
    groups: Sequence[RowGroup],
    judgements: Sequence[Judgement],
    vocab_limit: int,
) -> list[tuple[TokenLogprobs, ...]]:
    """One entry per emitted token, for the groups whose parameters ask; empty for the others.

    Of the model's own distribution: before temperature, penalties, biases, grammars and filters.

    Args:
        logits: float32 [R, V] as `judge` takes them.
    """
    asked = [group.params.logprobs for group in groups]
    rows: list[int] = []
    tokens: list[int] = []
    starts = accumulate(map(len, groups), initial=0)
    for start, count, judgement in zip(starts, asked, judgements, strict=False):
        if count is not None:
            rows += (start, *(start + 1 + node for node in judgement.path))
            tokens += judgement.emitted
    most = max((count for count in asked if count is not None), default=0)
    entries = iter(token_logprobs(logits[rows, :vocab_limit], tokens, most) if rows else ())
    return [
        tuple(_with_top(next(entries), count) for _ in judgement.emitted if count is not None)
        for count, judgement in zip(asked, judgements, strict=True)
    ]


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Each row's log-probability of its token, and its `count` most probable ids.

    Args:
        logits: float32 [N, V], one row per token.
    """
    logprobs = logits.log_softmax(-1).clamp_min(LOWEST)
    index = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    own = logprobs.gather(1, index[:, None])
    values, ids = logprobs.topk(min(count, logits.shape[1]), dim=-1)
    width = values.shape[1]
    # Ids are whole numbers below 2^53, so one copy as float64 brings all of it to the host.
    packed = torch.cat((own.double(), values.double(), ids.double()), 1).tolist()
    return [
        TokenLogprobs(own, tuple(zip(map(int, top[width:]), top[:width], strict=True)))
        for own, *top in packed
    ]


def _with_top(entry: TokenLogprobs, count: int | None) -> TokenLogprobs:
    return replace(entry, top=entry.top[:count])
