"""The acceptance rules, side by side, and the walk that reads a verdict off.

Rows: each session brings the root's row, then one row per node of its tree; row `i + 1` belongs to
node `i`. A row's distribution is that of the token *after* its own, chosen at absolute position
`position + depth`. Every rule yields a token per row and says which nodes it accepts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdec_ray.sampling.logits import Distribution, RowParams
from specdec_ray.sampling.noise import Purpose, exponential, row_keys, subkeys, uniform
from specdec_ray.speculation.proposal import Children
from specdec_ray.speculation.tree import ROOT, TokenTree

INVALID = -1  # the token of a row whose logits are NaN or have no finite maximum
INCOMPLETE = -2  # the token of a row whose distribution had too few candidates
TYPICAL_THRESHOLD = 0.09  # most that typical acceptance asks of p(x); Medusa's value
TYPICAL_DELTA = 0.3  # what it asks as a share of exp(-entropy); Medusa's value


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
    target: Distribution, rows: RowParams, children: Children
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling: accept x with probability min(1, p(x)/q(x)), else go on with the
    residual norm(max(p - q, 0)) in place of p: try the next sibling against it, or draw from it.

    Leviathan, Kalman, Matias 2023; Chen et al. 2023; for siblings drawn without replacement Miao
    et al. 2024 (SpecInfer), Chen et al. 2024 (Sequoia). Exact because
    min(p, q) + (1 - sum min(p, q)) * residual = p, for the q that was really sampled from; coins
    and residual draw must be independent of the draws from q and of each other.

    Returns:
        bool [N, B] whether a child is accepted if those before it are not, int64 [N] the token if
        none is.
    """
    accept_probs, residual = rejection_law(target, children)
    return _toss(accept_probs, rows), race(residual, rows, Purpose.RESIDUAL)


def rejection_law(target: Distribution, children: Children) -> tuple[torch.Tensor, Distribution]:
    """The two laws of `rejection`: float64 [N, B] the probability that a child is accepted if those
    before it are not, 0 without one, and the residual, not normalised, on the target's support.

    A child that repeats a sibling, or whose q has no mass beyond its siblings, is passed over.
    """
    weights = target.probs.double()
    accept_probs = []
    for rank in range(children.tokens.shape[1]):
        p_child, q_child, q = _meet(target, weights, children, rank)
        accept_probs.append(torch.where(q_child > 0, (p_child / q_child).clamp(max=1), 0.0))
        left = (weights - q).clamp_(min=0)
        mass = left.sum(-1, keepdim=True)
        # Without residual mass p equals q and rejection has probability zero; p keeps the draw
        # defined. Without q(x) the child is no draw from q.
        passed = (mass > 0) & (q_child[:, None] > 0)
        weights = torch.where(passed, left / mass, weights)
    return torch.stack(accept_probs, 1), replace(target, probs=weights)


def block(
    target: Distribution, rows: RowParams, children: Children, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification of chains: as exact as `rejection`, and on average accepts no less.

    Sun et al., ICLR 2025, "Block Verification Accelerates Speculative Decoding". Each row of a
    chain tosses whether the block is accepted down to it; the deepest that wins counts.

    Args:
        children: of whole chains, each row's child in the next row (B = 1).
        longest: most nodes of a chain.

    Returns:
        bool [N, 1] whether the child is accepted, int64 [N] the token if it is not.
    """
    reach_probs, residual = block_law(target, children, longest)
    ends_here_or_below = _toss(reach_probs[:, None], rows)[:, 0]
    has_child = children.tokens[:, 0] >= 0
    taken = torch.zeros_like(has_child)
    for _ in range(longest):
        taken = has_child & (ends_here_or_below | taken).roll(-1)
    return taken[:, None], race(residual, rows, Purpose.RESIDUAL)


def block_law(
    target: Distribution, children: Children, longest: int
) -> tuple[torch.Tensor, Distribution]:
    """The two laws of `block`: float64 [N] the chance that a row's own coin accepts the block down
    to it, 1 at roots, and the residual, not normalised, on the target's support."""
    p = target.probs.double()
    has_child = children.tokens[:, 0] >= 0
    p_child, q_child, q = _meet(target, p, children, 0)
    ratio = torch.where(q_child > 0, p_child / q_child, 0.0)
    is_root = ~has_child.roll(1)
    joint = torch.ones_like(ratio)  # settles one row deeper with each turn
    for _ in range(longest):
        joint = torch.where(is_root, 1.0, (joint * ratio).roll(1)).clamp(max=1)
    left = (joint[:, None] * p - q).clamp_(min=0)
    mass = left.sum(-1)
    # 0/0 where p equals q and all was accepted: so will be what follows.
    inner = (mass / (mass + (1 - joint))).nan_to_num(1.0)
    weights = torch.where(mass[:, None] > 0, left, p)
    return torch.where(has_child, inner, joint), replace(target, probs=weights)


def typical(
    target: Distribution, rows: RowParams, children: Children
) -> tuple[torch.Tensor, torch.Tensor]:
    """Typical acceptance, **lossy**: a child is accepted if p(x) > min(0.09, 0.3 exp(-H(p))),
    whatever it was drawn from; a row none of whose children is accepted draws from p.

    Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
    Heads". Texts do not have the target's distribution: likely drafts displace it.

    Returns:
        bool [N, B] whether a child is accepted, int64 [N] the token if none is.
    """
    p = target.probs.double()
    entropy = torch.special.entr(p).sum(-1, keepdim=True)
    threshold = (TYPICAL_DELTA * (-entropy).exp()).clamp(max=TYPICAL_THRESHOLD)
    columns, held = target.find(children.tokens)
    return held & (p.gather(1, columns) > threshold), race(target, rows, Purpose.RESIDUAL)


def _drawn_from(children: Children, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q of one rank's children without the siblings before them: ids and float64 probs [N, m]."""
    nodes = children.nodes[:, rank]
    ids, q = children.draft.ids[nodes], children.draft.probs[nodes].double()
    q = torch.where(children.tokens[:, rank, None] < 0, 0.0, q)
    if rank:
        siblings = children.tokens[:, None, :rank]
        q = torch.where((ids[:, :, None] == siblings).any(-1), 0.0, q)
        q = (q / q.sum(-1, keepdim=True)).nan_to_num(0.0)
    return ids, q


def _meet(
    target: Distribution, weights: torch.Tensor, children: Children, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where p and the q of one rank's children meet.

    Args:
        weights: float64 [N, S], what stands for p on the target's support.

    Returns:
        p and q of the children, float64 [N], and q on the target's support, [N, S].
    """
    child = children.tokens[:, rank, None]
    q_ids, q = _drawn_from(children, rank)
    columns, held = target.find(torch.cat((child, q_ids), 1))
    p_child = (weights.gather(1, columns[:, :1]) * held[:, :1])[:, 0]
    q_child = (q * (q_ids == child)).sum(-1)
    on_support = torch.zeros_like(weights).scatter_add_(1, columns[:, 1:], q * held[:, 1:])
    return p_child, q_child, on_support


def _toss(probs: torch.Tensor, rows: RowParams) -> torch.Tensor:
    """Independent coins that fall on True with `probs` [N, B]."""
    ranks = torch.arange(probs.shape[1], device=probs.device)
    return uniform(subkeys(_keys(rows, Purpose.ACCEPT)[:, None], ranks)) < probs


def race(weights: Distribution, rows: RowParams, purpose: Purpose) -> torch.Tensor:
    """argmin E/p per row, as argmax p/E: int64 [N], or INVALID or INCOMPLETE."""
    best, column = race_keys(weights, rows, purpose).max(-1)
    tokens = weights.ids.gather(1, column[:, None])[:, 0]
    if weights.complete is not None:
        tokens = torch.where(weights.complete, tokens, INCOMPLETE)
    return torch.where(best.isfinite(), tokens, INVALID)


def race_keys(weights: Distribution, rows: RowParams, purpose: Purpose) -> torch.Tensor:
    """p/E of each id, float64 [N, S]: the larger, the sooner its exponential clock of rate p."""
    noise = exponential(_keys(rows, purpose), weights.ids[0] if weights.all_ids else weights.ids)
    return weights.probs / noise


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
    """What is drawn once per position is keyed by it. Drafts and coins are drawn anew each round:
    the round before may have ended early because of what it drew for these very positions."""
    if purpose in (Purpose.COUPLED, Purpose.RESIDUAL):
        return row_keys(rows.seed, rows.choice, rows.position, purpose)
    return subkeys(row_keys(rows.seed, rows.choice, rows.base, purpose), rows.position - rows.base)
