"""The acceptance rules, side by side, and the walk that reads a verdict off.

Rows: each session brings the root's row, then one row per node of its tree; row `i + 1` belongs to
node `i`. A row's distribution is that of the token *after* its own, chosen at absolute position
`position + depth`. Every rule yields a token per row and says which nodes it accepts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec_ray.sampling.logits import Distribution, RowParams
from specdec_ray.sampling.noise import Purpose, exponential, row_keys, uniform
from specdec_ray.speculation.proposal import DraftProbs
from specdec_ray.speculation.tree import ROOT, TokenTree


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Temperature 0: each row's token is its argmax; a node equal to its parent row's token is
    accepted. int64 [N] from float32 [N, V]."""
    return logits.argmax(-1)


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
    target: Distribution, vocab: int, rows: RowParams, children: torch.Tensor, draft: DraftProbs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling on chains: accept x with probability min(1, p(x)/q(x)), else draw from
    the residual norm(max(p - q, 0)); a row without a child draws from p.

    Leviathan, Kalman, Matias 2023; Chen et al. 2023. Exact because
    min(p, q) + (1 - sum min(p, q)) * residual = p, for the q that was really sampled from.

    Args:
        target: distributions of N rows.
        vocab: V.
        children: int64 [N], the drafted token below each row, -1 where there is none.
        draft: q of the rows' children, [N, m]; zero rows where there is no child.

    Returns:
        bool [N] whether the child is accepted, int64 [N] the token if it is not.
    """
    n = children.shape[0]
    dense = target.probs.new_zeros(n, vocab).double()
    p = dense.scatter(1, target.ids, target.probs.double())
    q = draft.probs.double()
    p_child = p.gather(1, children.clamp(min=0)[:, None])[:, 0]
    q_child = (q * (draft.ids == children[:, None])).sum(-1)
    coins = uniform(_keys(rows, Purpose.ACCEPT))
    accepted = (children >= 0) & (coins * q_child < p_child)
    residual = p.scatter_add(1, draft.ids, -q).clamp(min=0)
    # Without residual mass p equals q and rejection has probability zero; p keeps the draw defined.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    ids = torch.arange(vocab, device=p.device).expand_as(p)
    return accepted, race(Distribution(ids, residual), rows, Purpose.RESIDUAL)


def race(weights: Distribution, rows: RowParams, purpose: Purpose) -> torch.Tensor:
    """argmin E/p per row, as argmax p/E: int64 [N].

    Raises:
        FloatingPointError: the model produced NaN.
    """
    noise = exponential(_keys(rows, purpose), weights.ids)
    best, index = (weights.probs.double() / noise).max(-1)
    if bool(best.isnan().any()):
        raise FloatingPointError("the model produced NaN logits")
    return weights.ids.gather(1, index[:, None])[:, 0]


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
