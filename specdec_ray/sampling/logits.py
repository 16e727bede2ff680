"""From logits to the distribution a request samples from.

Order and meaning follow transformers' warpers: temperature, top-k, top-p, min-p. Every filter keeps
what reaches a threshold *value*, so tokens tied with the last kept one stay too. Logits of
bfloat16 models tie all the time, and any order among ties would differ between devices and batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec_ray.sampling.params import SamplingParams

# Filters look at the most probable ids only, because a sort of 152k ids takes 11 ms a row on a CPU.
TOP_K_CANDIDATES = 128
NUCLEUS_CANDIDATES = 1024
WIDE_CANDIDATES = 16384  # for rows that those do not suffice for: 3 ms each instead of 20
_TIES = 64  # room for tokens tied with the k-th
_MIN_TEMPERATURE = 1e-30  # one-hot already, and float32 logits do not overflow


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Sparse distributions of N rows.

    Attributes:
        ids: int64 [N, S], token ids of the support.
        probs: float32 [N, S], zero where filtered out; each row sums to one, or is NaN where the
            logits had no finite maximum.
        all_ids: the support is the whole vocabulary in order, in every row.
        complete: bool [N], False where the candidates were too few to hold all that the filters
            keep; None if they always suffice.
    """

    ids: torch.Tensor
    probs: torch.Tensor
    all_ids: bool = False
    complete: torch.Tensor | None = None

    def find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of `ids` [N, m] in the support, and whether they are there."""
        last = self.ids.shape[1] - 1
        if self.all_ids:
            return ids.clamp(0, last), (ids >= 0) & (ids <= last)
        ordered, order = self.ids.sort(-1)
        at = torch.searchsorted(ordered, ids).clamp_(max=last)
        return order.gather(1, at), ordered.gather(1, at) == ids


@dataclass(frozen=True, slots=True, eq=False)
class RowParams:
    """Sampling parameters of N rows, as tensors on the logits' device.

    Attributes:
        temperature, top_p, min_p: float64 [N].
        top_k, seed, choice, position: int64 [N]; top_k 0 keeps all.
        base: int64 [N], position at which the row's round begins.
        filtered: some row has a filter at all. Known on the host, so that no step waits for it.
        needs_mass: some row has a top_p that counts against the whole vocabulary.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    position: torch.Tensor
    base: torch.Tensor
    filtered: bool
    needs_mass: bool

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        device: torch.device,
        bases: Sequence[int] | None = None,
    ) -> "RowParams":
        """One entry of `params`, `positions` and `bases` per row; rounds begin at their own
        position unless told."""
        floats = torch.tensor(
            [(max(p.temperature, _MIN_TEMPERATURE), p.top_p, p.min_p) for p in params],
            dtype=torch.float64,
        ).to(device)
        ints = torch.tensor(
            [
                (p.top_k, p.seed, p.choice, position, base)
                for p, position, base in zip(params, positions, bases or positions, strict=True)
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
            base=ints[:, 4],
            filtered=any(p.top_k or p.top_p < 1 or p.min_p for p in params),
            needs_mass=any(p.top_p < 1 and not p.top_k for p in params),
        )


def candidate_count(params: SamplingParams) -> int | None:
    """How many of the most probable ids to look at: a function of the request alone, so that a
    row's numbers do not depend on its batch. None means all."""
    if params.top_k:
        tiers = (TOP_K_CANDIDATES, NUCLEUS_CANDIDATES, WIDE_CANDIDATES)
        return next((count for count in tiers if params.top_k + _TIES <= count), None)
    return NUCLEUS_CANDIDATES if params.top_p < 1 or params.min_p else None


def distribution(
    logits: torch.Tensor, rows: RowParams, candidates: int | None = None
) -> Distribution:
    """The processed distributions. Never changes `logits`.

    Args:
        logits: float32 [N, V]; -inf means probability zero.
        rows: parameters of the N rows, temperatures above zero.
        candidates: support to look at; None for the whole vocabulary.
    """
    vocab = logits.shape[1]
    if candidates is None and not rows.filtered:
        ids = torch.arange(vocab, device=logits.device).expand_as(logits)
        probs = (logits / rows.temperature.float()[:, None]).softmax(-1)
        return Distribution(ids, probs, all_ids=True)
    count = min(candidates or vocab, vocab)
    values, ids = logits.topk(count)
    scaled = values.double() / rows.temperature[:, None]
    weights = _filtered(scaled, rows, logits if count < vocab else None)
    probs = (weights / weights.sum(-1, keepdim=True)).float()
    # A top-p counts against the mass of all k, which fewer candidates than k do not tell.
    complete = (probs[:, -1] == 0) & (rows.top_k <= count) if count < vocab else None
    return Distribution(ids, probs, complete=complete)


def _filtered(scaled: torch.Tensor, rows: RowParams, logits: torch.Tensor | None) -> torch.Tensor:
    """Weights p / max p float64 [N, S], zero where a filter drops the token.

    Args:
        scaled: float64 [N, S], logits over temperature in descending order.
        logits: the whole vocabulary's, if `scaled` is only a part of it.
    """
    count = scaled.shape[1]
    weights = (scaled - scaled[:, :1]).exp_()
    limit = torch.where(rows.top_k > 0, rows.top_k, count).clamp(max=count)
    weights.masked_fill_(scaled < scaled.gather(1, limit[:, None] - 1), 0.0)
    mass = weights.sum(-1)
    if rows.needs_mass and logits is not None:
        mass = torch.where(rows.top_k > 0, mass, _mass(logits, rows))
    before = weights.cumsum(-1) - weights  # the mass of more probable tokens
    nucleus = torch.where(rows.top_p < 1, rows.top_p * mass, torch.inf)
    last = scaled.masked_fill(before >= nucleus[:, None], torch.inf).amin(-1, keepdim=True)
    return weights.masked_fill_((scaled < last) | (weights < rows.min_p[:, None]), 0.0)


def _mass(logits: torch.Tensor, rows: RowParams) -> torch.Tensor:
    """sum p / max p over the vocabulary: float64 [N]."""
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(rows.temperature.float()[:, None])
    return scaled.exp_().sum(-1).double()
