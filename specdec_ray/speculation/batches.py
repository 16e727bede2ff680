"""Rows of one step sorted into batches that one tensor expression decides.

Greedy rows need neither softmax nor noise, and a row that samples from the whole vocabulary would
widen everyone's support to it, so they are kept apart.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from specdec_ray.errors import InvalidParameter
from specdec_ray.sampling.edits import History, edit_
from specdec_ray.sampling.logits import RowParams
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Children, DraftProbs, Rule
from specdec_ray.speculation.tree import TokenTree

# Elements of a batch. On a CPU float64 temporaries stay below 8 MB: larger ones come fresh from the
# system each time, which made 48 rows of 152k ids five times slower. A GPU prefers few kernels.
_CPU_BATCH = 2**20
_GPU_BATCH = 2**26


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One session's rows in a target step.

    Attributes:
        position: absolute position of the token that the root's row chooses.
        draft_probs: q of each node under a rule that needs it; None if the proposal is
            deterministic, which makes q one-hot.
        depth: of the root's row below the round's beginning, where a draft draws a later token.
        context: tokens before the root's row, and how many of them are the prompt; read only where
            the parameters depend on them.
        allowed: bool [rows, V], what a grammar allows at each row; None where there is none.
    """

    params: SamplingParams
    rule: Rule
    position: int
    tree: TokenTree = field(default_factory=TokenTree)
    draft_probs: DraftProbs | None = None
    context: Sequence[int] = ()
    prompt_length: int = 0
    allowed: torch.Tensor | None = None
    depth: int = 0

    def __len__(self) -> int:
        return 1 + len(self.tree)

    @property
    def compares(self) -> bool:
        """Whether a node is accepted for being its parent row's token, as at temperature 0."""
        return self.rule is Rule.COUPLED or self.params.greedy

    def check_tree(self) -> None:
        """Raise InvalidParameter unless the rule verifies trees of this shape."""
        if self.rule is Rule.BLOCK and not (self.compares or self.tree.is_chain):
            raise InvalidParameter("parents", "block verification takes chains only, not trees")

    @property
    def edits_logits(self) -> bool:
        return self.allowed is not None or self.params.edits_logits

    def edit_(self, logits: torch.Tensor) -> None:
        """Edit the session's own rows of logits in place."""
        history = History(self.context, self.prompt_length, ((), *self.tree.paths))
        edit_(logits, self.params, history, self.allowed)


@dataclass(slots=True)
class RowBatch:
    """Rows of sessions that share a rule and a number of candidates.

    Attributes:
        rule: None for greedy rows.
        candidates: see `distribution`.
        groups: the sessions.
        rows: the sessions' rows in the step's logits, ascending.
    """

    rule: Rule | None
    candidates: int | None
    groups: list[RowGroup] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def add(self, group: RowGroup, first_row: int) -> None:
        self.groups.append(group)
        self.rows.extend(range(first_row, first_row + len(group)))

    def index(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.rows, device=device)

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        """The batch's rows, without a copy where it has them all."""
        return logits if len(self.rows) == len(logits) else logits[self.index(logits.device)]

    def row_params(self, device: torch.device) -> RowParams:
        params = [group.params for group in self.groups for _ in range(len(group))]
        positions = [
            group.position + depth for group in self.groups for depth in (0, *group.tree.depths)
        ]
        bases = [group.position - group.depth for group in self.groups for _ in range(len(group))]
        return RowParams.of(params, positions, device, bases)

    @property
    def longest(self) -> int:
        """Most nodes of a session's tree."""
        return max(len(group.tree) for group in self.groups)

    def children(self, device: torch.device) -> Children:
        """The nodes below each row, and the q they were drawn from, padded to one width."""
        parents, ranks = self._places()
        shape = len(self.rows), max(ranks) + 1
        own = [row for row, parent in enumerate(parents) if parent >= 0]
        nodes = torch.tensor(own, dtype=torch.int64)
        below = torch.tensor(parents)[nodes], torch.tensor(ranks)[nodes]
        drafted = [token for group in self.groups for token in (-1, *group.tree.tokens)]
        tokens = torch.full(shape, -1).index_put_(below, torch.tensor(drafted)[nodes])
        rows = torch.zeros(shape, dtype=torch.int64).index_put_(below, nodes)
        draft = self._draft_probs()
        return Children(
            tokens.to(device),
            rows.to(device),
            DraftProbs(draft.ids.to(device), draft.probs.to(device)),
        )

    def by_node(self, of_children: torch.Tensor) -> torch.Tensor:
        """What is known of each row's children [N, B] by the child's own row [N]; any for roots."""
        parents, ranks = torch.tensor(self._places()).to(of_children.device)
        return of_children[parents, ranks]

    def _places(self) -> tuple[list[int], list[int]]:
        """Each row's parent row in the batch, -1 for roots, and its rank among its siblings."""
        parents: list[int] = []
        ranks: list[int] = []
        for group in self.groups:
            first = len(parents)
            siblings: Counter[int] = Counter()
            parents.append(-1)
            ranks.append(0)
            for parent in group.tree.parents:
                parents.append(first + parent + 1)
                ranks.append(siblings[parent])
                siblings[parent] += 1
        return parents, ranks

    def _draft_probs(self) -> DraftProbs:
        """q of each row's node, padded to one width; zero for roots."""
        shipped = [group.draft_probs for group in self.groups if group.draft_probs is not None]
        width = max((probs.ids.shape[1] for probs in shipped), default=1)
        ids = torch.zeros(len(self.rows), width, dtype=torch.int64)
        values = torch.zeros(len(self.rows), width)
        row = 0
        for group in self.groups:
            nodes, probs = slice(row + 1, row + len(group)), group.draft_probs
            if probs is None:
                ids[nodes, 0] = torch.tensor(group.tree.tokens, dtype=torch.int64)
                values[nodes, 0] = 1.0
            else:
                ids[nodes, : probs.ids.shape[1]] = probs.ids
                values[nodes, : probs.ids.shape[1]] = probs.probs
            row += len(group)
        return DraftProbs(ids, values)


def edited(logits: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
    """The step's logits [R, V] as the requests change them; a copy if any of them does."""
    if not any(group.edits_logits for group in groups):
        return logits
    logits = logits.clone()
    row = 0
    for group in groups:
        if group.edits_logits:
            group.edit_(logits[row : row + len(group)])
        row += len(group)
    return logits


def batches(
    groups: Sequence[RowGroup],
    logits: torch.Tensor,
    candidates: Callable[[SamplingParams], int | None],
) -> Iterable[RowBatch]:
    """The batches of a step whose groups' rows follow each other in `logits` [R, V].

    Raises:
        InvalidParameter: block verification is asked of more than a chain.
    """
    capacity = _CPU_BATCH if logits.device.type == "cpu" else _GPU_BATCH
    full: list[RowBatch] = []
    filling: dict[tuple[Rule | None, int | None], RowBatch] = {}
    row = 0
    for group in groups:
        group.check_tree()
        greedy = group.params.greedy
        key = (None, None) if greedy else (group.rule, candidates(group.params))
        batch = filling.setdefault(key, RowBatch(*key))
        width = 1 if greedy else key[1] or logits.shape[1]
        if batch.rows and (len(batch.rows) + len(group)) * width > capacity:
            full.append(batch)
            batch = filling[key] = RowBatch(*key)
        batch.add(group, row)
        row += len(group)
    return full + list(filling.values())
