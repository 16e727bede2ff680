"""The two entries that engines call once per step: a target's `judge`, a draft's `draw`.

Rows of many sessions are decided together, whatever their rules and parameters; one copy to the
host ends a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specdec_ray.sampling.logits import RowParams, distribution
from specdec_ray.sampling.noise import Purpose
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.acceptance import Judgement, coupled, greedy, race, rejection, walk
from specdec_ray.speculation.proposal import DraftProbs, Rule
from specdec_ray.speculation.tree import TokenTree

# Ids a draft samples among: 2.5 KB of q a round at k = 5, whatever the vocabulary.
DRAFT_SUPPORT = 64


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
    chosen = tokens.sample()
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
    tokens = drawn.sample(support=DRAFT_SUPPORT)
    probs: dict[int, DraftProbs] = {}
    if racing:
        drawing = torch.tensor(racing, device=logits.device)
        params = RowParams.of(
            [rows[i].params for i in racing], [rows[i].position for i in racing], logits.device
        )
        q = distribution(logits[drawing], params, support=DRAFT_SUPPORT)
        tokens[drawing] = race(q, params, Purpose.DRAFT)
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

    def sample(self, support: int | None = None) -> torch.Tensor:
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
            tokens[index] = coupled(distribution(logits[index], row_params, support), row_params)
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
