"""From logits to the distribution a request samples from.

Order and meaning follow transformers' warpers: temperature, top-k, top-p, min-p. Tokens tied with
the k-th are dropped beyond k; which of them stay follows torch.topk and torch.sort.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec_ray.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Sparse distributions of N rows.

    Attributes:
        ids: int64 [N, S], token ids of the support, most probable first where filtered.
        probs: float32 [N, S], zero where filtered out; each row sums to one.
    """

    ids: torch.Tensor
    probs: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowParams:
    """Sampling parameters of N rows, as tensors on the logits' device.

    Attributes:
        temperature, top_p, min_p: float32 [N].
        top_k, seed, choice, position: int64 [N]; top_k 0 keeps all.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    position: torch.Tensor

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device
    ) -> "RowParams":
        """One entry of `params` and `positions` per row."""
        floats = torch.tensor([(p.temperature, p.top_p, p.min_p) for p in params]).to(device)
        ints = torch.tensor(
            [
                (p.top_k, p.seed, p.choice, position)
                for p, position in zip(params, positions, strict=True)
            ]
        ).to(device)
        return cls(
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            top_k=ints[:, 0],
            seed=ints[:, 1],
            choice=ints[:, 2],
            position=ints[:, 3],
        )

    def take(self, rows: torch.Tensor) -> "RowParams":
        return RowParams(*(getattr(self, name)[rows] for name in self.__slots__))


def distribution(logits: torch.Tensor, rows: RowParams, support: int | None = None) -> Distribution:
    """The processed distributions. Never changes `logits`.

    Args:
        logits: float32 [N, V]; -inf means probability zero.
        rows: parameters of the N rows, temperatures above zero.
        support: keep at most that many of the most probable ids; None keeps what top-k keeps.
    """
    scaled = logits / rows.temperature[:, None]
    vocab = logits.shape[1]
    limit = torch.where(rows.top_k > 0, rows.top_k, vocab).clamp(max=support or vocab)
    width = int(limit.max())
    sorting = width < vocab or bool((rows.top_p < 1).any())
    if sorting:
        scaled, ids = torch.topk(scaled, width) if width < vocab else scaled.sort(descending=True)
        ranks = torch.arange(width, device=logits.device)
        scaled = scaled.masked_fill(ranks >= limit[:, None], -torch.inf)
    else:
        ids = torch.arange(vocab, device=logits.device).expand_as(scaled)
    probs = scaled.softmax(-1)
    if sorting:
        before = probs.cumsum(-1) - probs  # the mass of more probable tokens
        probs = probs.masked_fill(before >= rows.top_p[:, None], 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    floor = rows.min_p[:, None] * probs.amax(-1, keepdim=True)
    probs = probs.masked_fill(probs < floor, 0.0)
    return Distribution(ids, probs / probs.sum(-1, keepdim=True))
