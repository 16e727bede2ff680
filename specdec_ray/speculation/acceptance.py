"""The acceptance rules, side by side, and the walk that reads a verdict off.

Rows: each session brings the root's row, then one row per node of its tree; row `i + 1` belongs to
node `i`. A row's distribution is that of the token *after* its own, chosen at absolute position
`position + depth`. Every rule yields a token per row and says which nodes it accepts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdec_ray.sampling.logits import Distribution, RowParams
from specdec_ray.sampling.noise import Purpose, exponential, row_keys, uniform
from specdec_ray.speculation.proposal import DraftProbs
from specdec_ray.speculation.tree import ROOT, TokenTree

INVALID = -1  # the token of a row whose logits are NaN or have no finite maximum
INCOMPLETE = -2  # the token of a row whose distribution had too few candidates


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Temperature 0: each row's token is its argmax, the first of several; a node equal to its
    parent row's token is accepted. int64 [N] from float32 [N, V]."""
    best, tokens = logits.max(-1)
    return torch.where(best.isfinite(), tokens, INVALID)


def coupled(target: Distribution, rows: RowParams) -> torch.Tensor:
    """Gumbel coupling: each row's token is argmin E/p, with noise that target and draft share.

    Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative
    Decoding". The minimum of exponentials with rates p falls on x with probability p(x), so the
    token has the target's law whatever was proposed; a node equal to its parent row's token is
    accepted, which changes how soon a token is known, never which one it is.

    Returns:
        int64 [N].
    """
    return race(target, rows, Purpose.COUPLED)


def rejection(
    target: Distribution, rows: RowParams, children: torch.Tensor, draft: DraftProbs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling on chains: accept x with probability min(1, p(x)/q(x)), else draw from
    the residual norm(max(p - q, 0)); a row without a child draws from p.

    Leviathan, Kalman, Matias 2023; Chen et al. 2023. Exact because
    min(p, q) + (1 - sum min(p, q)) * residual = p, for the q that was really sampled from; coin
    and residual draw must be independent of the draw from q and of each other.

    Args:
        target: distributions of N rows.
        children: int64 [N], the drafted token below each row, -1 where there is none.
        draft: q of the rows' children, [N, m]; zero rows where there is no child.

    Returns:
        bool [N] whether the child is accepted, int64 [N] the token if it is not.
    """
    accept_probs, residual = rejection_law(target, children, draft)
    accepted = uniform(_keys(rows, Purpose.ACCEPT)) < accept_probs
    return accepted, race(residual, rows, Purpose.RESIDUAL)


def rejection_law(
    target: Distribution, children: torch.Tensor, draft: DraftProbs
) -> tuple[torch.Tensor, Distribution]:
    """The two laws of `rejection`: float64 [N] min(1, p(x)/q(x)) of the children, 0 without one,
    and the residual, not normalised, on the target's support."""
    columns, held = target.find(torch.cat((children[:, None], draft.ids), 1))
    p = target.probs.double()
    q = draft.probs.double()
    p_child = (p.gather(1, columns[:, :1]) * held[:, :1])[:, 0]
    q_child = (q * (draft.ids == children[:, None])).sum(-1)
    accept_probs = torch.where(q_child > 0, (p_child / q_child).clamp(max=1), 0.0)
    weights = p.scatter_add(1, columns[:, 1:], -q * held[:, 1:]).clamp_(min=0)
    # Without residual mass p equals q and rejection has probability zero; p keeps the draw defined.
    weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, p)
    return accept_probs, replace(target, probs=weights)


def race(weights: Distribution, rows: RowParams, purpose: Purpose) -> torch.Tensor:
    """argmin E/p per row, as argmax p/E: int64 [N], or INVALID or INCOMPLETE."""
    noise = exponential(_keys(rows, purpose), weights.ids[0] if weights.all_ids else weights.ids)
    best, column = (weights.probs / noise).max(-1)
    tokens = weights.ids.gather(1, column[:, None])[:, 0]
    if weights.complete is not None:
        tokens = torch.where(weights.complete, tokens, INCOMPLETE)
    return torch.where(best.isfinite(), tokens, INVALID)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Accepted nodes, root downwards, and the emitted tokens: theirs, then the bonus."""

    path: tuple[int, ...]
    emitted: tuple[int, ...]


def walk(tree: TokenTree, tokens: Sequence[int], accepted: Sequence[bool]) -> Judgement:
    """Follow accepted nodes down from the root; the bonus is the token of the last row reached.

    Args:
        tokens: token of each row, 1 + len(tree) of them.
        accepted: whether each node is accepted, given that its parent is.
    """
    path: list[int] = []
    at = ROOT
    for node, parent in enumerate(tree.parents):
        if parent == at and accepted[node]:
            path.append(node)
            at = node
    return Judgement(tuple(path), (*(tree.tokens[node] for node in path), tokens[at + 1]))


def _keys(rows: RowParams, purpose: Purpose) -> torch.Tensor:
    return row_keys(rows.seed, rows.choice, rows.position, purpose)
