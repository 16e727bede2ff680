"""Shapes of token trees, and how one grows, level by level, into a proposal.

Static: ranks fixed beforehand, as Cai et al. 2024 (Medusa) and Chen et al. 2024 (Sequoia). Dynamic:
the most probable nodes of each context, as Li et al. 2024 (EAGLE-2).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import nlargest

from specdec_ray.errors import InvalidParameter
from specdec_ray.speculation.proposal import DraftProbs
from specdec_ray.speculation.step import Drawn
from specdec_ray.speculation.tree import ROOT, TokenTree

MAX_NODES = 64  # of a tree: beyond, rows cost more than they bring

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """Most nodes that a proposal may have, and the deepest of them."""

    nodes: int
    depth: int


@dataclass(frozen=True)
class StaticShape:
    """A tree of child ranks.

    Attributes:
        choices: each node's ranks from below the root down to its own, like `medusa_choices`;
            rank 0 is the first child. Siblings need the ranks before theirs.

    Raises:
        InvalidParameter: a node's parent or a sibling before it is missing, or it is there twice.
    """

    choices: tuple[Ranks, ...]

    def __post_init__(self) -> None:
        known = {(), *self.choices}
        if len(known) != len(self.choices) + 1:
            raise InvalidParameter("choices", "holds a node twice, or the root")
        for ranks in self.choices:
            before = (*ranks[:-1], ranks[-1] - 1) if ranks[-1] else ranks[:-1]
            if before not in known:
                raise InvalidParameter("choices", f"{list(ranks)} needs {list(before)}")

    @classmethod
    def chain(cls, depth: int) -> "StaticShape":
        return cls.branching((1,) * depth)

    @classmethod
    def branching(cls, widths: Sequence[int]) -> "StaticShape":
        """Every node of one depth has the same number of children."""
        choices: list[Ranks] = []
        level: list[Ranks] = [()]
        for width in widths:
            level = [(*ranks, rank) for ranks in level for rank in range(width)]
            choices += level
        return cls(tuple(choices))

    @property
    def nodes(self) -> int:
        return len(self.choices)

    @cached_property
    def depth(self) -> int:
        return max(map(len, self.choices), default=0)

    @property
    def scratch(self) -> int:
        """KV slots that a tree needs beyond those of a chain as deep; none for a chain."""
        return self.nodes - self.depth

    @cached_property
    def widths(self) -> Mapping[Ranks, int]:
        """How many children the root and each inner node has."""
        return Counter(ranks[:-1] for ranks in self.choices)

    def within(self, budget: Budget) -> "StaticShape":
        """The part of the shape that fits: nodes of small rank and depth come first."""
        return _cut(self, budget)


@dataclass(frozen=True, slots=True)
class DynamicShape:
    """A tree that follows the draft's confidence.

    Attributes:
        width: nodes of a level that get children, and how many each.
        depth: levels.
        nodes: most that are proposed: of all that were drawn the most probable ones.
    """

    width: int
    depth: int
    nodes: int

    @property
    def scratch(self) -> int:
        """KV slots that a tree needs beyond those of a chain as deep, while it grows or after."""
        return max(self.nodes, self.width * (self.depth - 1)) - self.depth

    def within(self, budget: Budget) -> "DynamicShape":
        nodes, depth = min(self.nodes, budget.nodes), min(self.depth, budget.depth)
        return replace(self, depth=depth, nodes=nodes)


Shape = StaticShape | DynamicShape


@dataclass(frozen=True, slots=True)
class Sprout:
    """A node, or ROOT, that gets children next, and how many."""

    node: int
    width: int


class Growth:
    """A token tree as it grows.

    Attributes:
        tokens, parents: the nodes so far, as in `TokenTree`.
        sprouts: whose children are to be drawn next; none when the tree is complete.
    """

    def __init__(self, shape: Shape, budget: Budget) -> None:
        self._shape = shape.within(budget)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._ranks: list[Ranks] = []
        self._scores: list[float] = []
        self._probs: list[DraftProbs | None] = []
        self.sprouts = [] if min(budget.nodes, budget.depth) < 1 else self._first_sprouts()

    @property
    def pruned(self) -> bool:
        """Whether the proposal will be a choice among the nodes by their scores."""
        return isinstance(self._shape, DynamicShape)

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from below the root down to the node."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def extend(self, drawn: Sequence[Drawn]) -> None:
        """Take in the children of each sprout."""
        first = len(self.tokens)
        for sprout, children in zip(self.sprouts, drawn, strict=True):
            above = () if sprout.node == ROOT else self._ranks[sprout.node]
            score = 0.0 if sprout.node == ROOT else self._scores[sprout.node]
            for rank, token in enumerate(children.tokens):
                self.tokens.append(token)
                self.parents.append(sprout.node)
                self._ranks.append((*above, rank))
                self._scores.append(score + (children.scores[rank] if children.scores else 0.0))
                self._probs.append(children.probs)
        self.sprouts = self._next_sprouts(range(first, len(self.tokens)))

    def proposal(self) -> tuple[TokenTree, DraftProbs | None]:
        """The tree, and the laws its nodes were drawn from where the rule needs them."""
        kept = self._kept()
        place = {ROOT: ROOT} | {node: at for at, node in enumerate(kept)}
        tree = TokenTree(
            tuple(self.tokens[node] for node in kept),
            tuple(place[self.parents[node]] for node in kept),
        )
        laws = [law for node in kept if (law := self._probs[node]) is not None]
        return tree, DraftProbs.stack(laws) if laws else None

    def _first_sprouts(self) -> list[Sprout]:
        shape = self._shape
        return [Sprout(ROOT, shape.width if isinstance(shape, DynamicShape) else shape.widths[()])]

    def _next_sprouts(self, level: range) -> list[Sprout]:
        shape = self._shape
        if isinstance(shape, StaticShape):
            widths = ((node, shape.widths.get(self._ranks[node])) for node in level)
            return [Sprout(node, width) for node, width in widths if width]
        if not level or len(self._ranks[level[0]]) == shape.depth:
            return []
        # What is not proposed itself has no children that are.
        kept = set(self._kept())
        likely = [node for node in level if node in kept]
        best = nlargest(shape.width, likely, self._scores.__getitem__)
        return [Sprout(node, shape.width) for node in sorted(best)]

    def _kept(self) -> Sequence[int]:
        """Nodes to propose, ascending. A child never scores above its parent."""
        every = range(len(self.tokens))
        if not self.pruned:
            return every
        return sorted(nlargest(self._shape.nodes, every, self._scores.__getitem__))


@lru_cache
def _cut(shape: StaticShape, budget: Budget) -> StaticShape:
    if shape.nodes <= budget.nodes and shape.depth <= budget.depth:
        return shape
    shallow = [ranks for ranks in shape.choices if len(ranks) <= budget.depth]
    return StaticShape(tuple(sorted(shallow, key=_rank_cost)[: budget.nodes]))


def _rank_cost(ranks: Ranks) -> tuple[int, Ranks]:
    return len(ranks) + sum(ranks), ranks
