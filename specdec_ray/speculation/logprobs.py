"""Log-probabilities of tokens, always the target's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from specdec_ray.sampling.logits import RowParams, distribution
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

    Of the model's own distribution, before temperature, penalties, biases, grammars and filters;
    or of what these make of it, where the parameters say processed.

    Args:
        logits: float32 [R, V] as `judge` takes them.
    """
    asked = [group.params.logprobs for group in groups]
    taken: list[torch.Tensor] = []
    tokens: list[int] = []
    starts = accumulate(map(len, groups), initial=0)
    for start, group, judgement in zip(starts, groups, judgements, strict=False):
        if group.params.logprobs is not None:
            rows = logits[start : start + len(group), :vocab_limit]
            if group.params.processed_logprobs:
                rows = _processed(rows, group)
            taken.append(rows[[0, *(1 + node for node in judgement.path)]])
            tokens += judgement.emitted
    most = max((count for count in asked if count is not None), default=0)
    entries = iter(token_logprobs(torch.cat(taken), tokens, most) if taken else ())
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


def _processed(logits: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """Logits of the distributions that a group's tokens are drawn from; at temperature 0 of what
    the largest is taken from."""
    logits = logits.clone()
    if group.edits_logits:
        group.edit_(logits)
    if group.params.greedy:
        return logits
    count = len(logits)
    rows = RowParams.of([group.params] * count, [group.position] * count, logits.device)
    law = distribution(logits, rows)
    return torch.full_like(logits, -torch.inf).scatter_(1, law.ids, law.probs.log())


def _with_top(entry: TokenLogprobs, count: int | None) -> TokenLogprobs:
    return replace(entry, top=entry.top[:count])
