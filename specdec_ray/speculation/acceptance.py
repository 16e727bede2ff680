"""The acceptance rules, side by side, and the two entries that engines call once per step.

Rows: each session brings the root's row, then one row per node of its tree; row `i + 1` belongs to
node `i`. A row's distribution is that of the token *after* its own, chosen at absolute position
`position + depth`. Every rule yields a token per row and says which nodes it accepts; `walk` reads
the verdict off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specdec_ray.sampling.logits import Distribution, RowParams, distribution
from specdec_ray.sampling.noise import Purpose, exponential, row_keys, uniform
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import DraftProbs, Rule
from specdec_ray.speculation.tree import ROOT, TokenTree

DRAFT_SUPPORT = (
    64  # ids a draft samples among: 2.5 KB of q a round at k = 5, whatever the vocabulary
)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Temperature 0: each row's token is its argmax; a node equal to its parent row's token is
    accepted. int64 [N] from float32 [N, V]."""
    return logits.argmax(-1)


def coupled(target: Distribution, rows: RowParams) -> torch.Tensor:
    """Gumbel coupling: each row's token is argmin E/p over Exp(1) noise that target and draft share.

    Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative
    Decoding". The minimum of exponentials with rates p falls on x with probability p(x), so the
    token has the target's law whatever was proposed; a node equal to its parent row's token is
    accepted, which changes how soon a token is known, never which one it is.

    Returns:
        int64 [N].
    """
    return _race(target, rows, Purpose.COUPLED)


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
    return accepted, _race(Distribution(ids, residual), rows, Purpose.RESIDUAL)


def walk(tree: TokenTree, tokens: Sequence[int], accepted: Sequence[bool]) -> "Judgement":
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


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One session's rows in a target step.

    Attributes:
        position: absolute position of the token that the root's row chooses.
        draft_probs: q of each node, where the rule needs it.
    """

    params: SamplingParams
    rule: Rule
    position: int
    tree: TokenTree = field(default_factory=TokenTree)
    draft_probs: DraftProbs | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """Accepted nodes, root downwards, and the emitted tokens: theirs, then the bonus."""

    path: tuple[int, ...]
    emitted: tuple[int, ...]


def judge(logits: torch.Tensor, groups: Sequence[RowGroup], vocab_limit: int) -> list[Judgement]:
    """Verdicts of one target step over the rows of all sessions, whatever their rules.

    Args:
        logits: float32 [R, V], R = sum of 1 + len(tree) over the groups.
        vocab_limit: ids from here on are padding of the embedding and have probability zero.

    Raises:
        FloatingPointError: the model produced NaN.
    """
    if not groups:
        return []
    logits = logits[:, :vocab_limit]
    rejecting, tokens = _RejectionRows(), _Rows(logits)
    row = 0
    for group in groups:
        positions = [group.position, *(group.position + depth for depth in group.tree.depths)]
        rows = range(row, row + len(positions))
        if group.rule is Rule.REJECTION and not group.params.greedy:
            rejecting.add(group, rows, positions)
        else:
            tokens.add(group.params, rows, positions)
        row += len(positions)
    chosen = tokens.sample(Purpose.COUPLED)
    flags = torch.zeros_like(chosen, dtype=torch.bool)
    rejecting.decide(logits, chosen, flags)
    return _verdicts(groups, *torch.stack((chosen, flags)).tolist())


@dataclass(frozen=True, slots=True)
class DrawRow:
    """One session's row in a draft step; `position` is that of the token to draw."""

    params: SamplingParams
    rule: Rule
    position: int


def draw(
    logits: torch.Tensor, rows: Sequence[DrawRow], vocab_limit: int
) -> list[tuple[int, DraftProbs | None]]:
    """Drafted tokens of one draft step, each from its 64 most probable ids.

    Under the coupled rule the draft races with the target's own noise; under rejection it draws
    independently and returns the very q it drew from, float32 [1, 64].

    Args:
        logits: float32 [N, V], one row per entry of `rows`.
    """
    logits = logits[:, :vocab_limit]
    drawn, racing = _Rows(logits), []
    for index, row in enumerate(rows):
        if row.rule is Rule.REJECTION and not row.params.greedy:
            racing.append(index)
        else:
            drawn.add(row.params, [index], [row.position])
    tokens = drawn.sample(Purpose.COUPLED, support=DRAFT_SUPPORT)
    probs: dict[int, DraftProbs] = {}
    if racing:
        index = torch.tensor(racing, device=logits.device)
        params = RowParams.of(
            [rows[i].params for i in racing], [rows[i].position for i in racing], logits.device
        )
        q = distribution(logits[index], params, support=DRAFT_SUPPORT)
        tokens[index] = _race(q, params, Purpose.DRAFT)
        ids, values = q.ids.cpu(), q.probs.cpu()
        probs = {row: DraftProbs(ids[i : i + 1], values[i : i + 1]) for i, row in enumerate(racing)}
    return [(token, probs.get(index)) for index, token in enumerate(tokens.tolist())]


class _Rows:
    """Rows of one step whose token does not depend on the proposal, sampled in at most three
    batches: greedy ones, ones that top-k bounds, and full ones. A full row would widen the others'
    support to the vocabulary, and noise is what costs there."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._greedy: list[int] = []
        self._batches: dict[bool, tuple[list[int], list[SamplingParams], list[int]]] = {}

    def add(self, params: SamplingParams, rows: Sequence[int], positions: Sequence[int]) -> None:
        if params.greedy:
            self._greedy += rows
            return
        batch = self._batches.setdefault(params.top_k > 0, ([], [], []))
        batch[0].extend(rows)
        batch[1].extend([params] * len(rows))
        batch[2].extend(positions)

    def sample(self, purpose: Purpose, support: int | None = None) -> torch.Tensor:
        """Tokens int64 [R] of all rows; zero where no row was added."""
        logits = self._logits
        if len(self._greedy) == len(logits):
            return greedy(logits)
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        if self._greedy:
            index = torch.tensor(self._greedy, device=logits.device)
            tokens[index] = greedy(logits[index])
        for rows, params, positions in self._batches.values():
            index = torch.tensor(rows, device=logits.device)
            row_params = RowParams.of(params, positions, logits.device)
            target = distribution(logits[index], row_params, support)
            tokens[index] = _race(target, row_params, purpose)
        return tokens


class _RejectionRows:
    """Rows of one step that the rejection rule decides, in one batch."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._params: list[SamplingParams] = []
        self._positions: list[int] = []
        self._children: list[int] = []
        self._draft: list[DraftProbs | None] = []

    def add(self, group: RowGroup, rows: Sequence[int], positions: Sequence[int]) -> None:
        self._rows += rows
        self._params += [group.params] * len(rows)
        self._positions += positions
        self._children += [*group.tree.tokens, -1]
        self._draft.append(group.draft_probs)

    def decide(self, logits: torch.Tensor, tokens: torch.Tensor, flags: torch.Tensor) -> None:
        """Write the rows' tokens, and their children's acceptance into the children's rows."""
        if not self._rows:
            return
        device = logits.device
        index = torch.tensor(self._rows, device=device)
        params = RowParams.of(self._params, self._positions, device)
        children = torch.tensor(self._children, device=device)
        target = distribution(logits[index], params)
        accepted, replacement = rejection(
            target, logits.shape[1], params, children, self._q(device)
        )
        tokens[index] = replacement
        parents = children >= 0
        flags[index[parents] + 1] = accepted[parents]

    def _q(self, device: torch.device) -> DraftProbs:
        """q of every row's child, padded to one width, with a zero row for each last row."""
        width = max((probs.ids.shape[1] for probs in self._draft if probs is not None), default=1)
        ids = torch.zeros(len(self._rows), width, dtype=torch.int64)
        values = torch.zeros(len(self._rows), width)
        row = 0
        for probs in self._draft:
            if probs is not None:
                nodes, own = probs.ids.shape
                ids[row : row + nodes, :own] = probs.ids
                values[row : row + nodes, :own] = probs.probs
                row += nodes
            row += 1
        return DraftProbs(ids.to(device), values.to(device))


def _verdicts(groups: Sequence[RowGroup], tokens: list[int], flags: list[int]) -> list[Judgement]:
    judgements, row = [], 0
    for group in groups:
        size = 1 + len(group.tree)
        own = tokens[row : row + size]
        if group.rule is Rule.REJECTION and not group.params.greedy:
            accepted = [bool(flag) for flag in flags[row + 1 : row + size]]
        else:
            tree = group.tree
            accepted = [
                own[parent + 1] == token
                for parent, token in zip(tree.parents, tree.tokens, strict=True)
            ]
        judgements.append(walk(group.tree, own, accepted))
        row += size
    return judgements


def _race(weights: Distribution, rows: RowParams, purpose: Purpose) -> torch.Tensor:
    """argmin E/p per row, as argmax p/E: int64 [N]."""
    noise = exponential(_keys(rows, purpose), weights.ids)
    best, index = (weights.probs.double() / noise).max(-1)
    if bool(best.isnan().any()):
        raise FloatingPointError("the model produced NaN logits")
    return weights.ids.gather(1, index[:, None])[:, 0]


def _keys(rows: RowParams, purpose: Purpose) -> torch.Tensor:
    return row_keys(rows.seed, rows.choice, rows.position, purpose)
