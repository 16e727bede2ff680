"""Log-probabilities of emitted tokens, always the target's."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from specdec_ray.speculation.acceptance import Judgement
from specdec_ray.speculation.batches import RowGroup

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot spell


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the target's probabilities at one emitted token's place.

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
    rows: list[int] = []
    tokens: list[int] = []
    starts = accumulate(map(len, groups), initial=0)
    for start, group, judgement in zip(starts, groups, judgements, strict=False):
        if group.params.logprobs is not None:
            rows += (start, *(start + 1 + node for node in judgement.path))
            tokens += judgement.emitted
    if not rows:
        return [()] * len(groups)
    count = max(group.params.logprobs or 0 for group in groups)
    logprobs = logits[rows, :vocab_limit].log_softmax(-1).clamp_min(LOWEST)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    values, ids = logprobs.topk(min(count, vocab_limit), dim=-1)
    # Ids are whole numbers below 2^53, so one copy as float64 brings all of it to the host.
    packed = torch.cat((own.double(), values.double(), ids.double()), 1).tolist()
    entries = iter(packed)
    return [
        tuple(
            _entry(next(entries), values.shape[1], group.params.logprobs)
            for _ in judgement.emitted
            if group.params.logprobs is not None
        )
        for group, judgement in zip(groups, judgements, strict=True)
    ]


def _entry(packed: Sequence[float], width: int, count: int) -> TokenLogprobs:
    values, ids = packed[1 : 1 + width], packed[1 + width :]
    pairs = zip(map(int, ids[:count]), values[:count], strict=True)
    return TokenLogprobs(packed[0], tuple(pairs))
