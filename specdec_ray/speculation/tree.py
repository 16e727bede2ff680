"""The token tree: what a proposer proposes in one round. A chain is its simplest case."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_ray.errors import InvalidParameter

ROOT = -1


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Drafted tokens in topological order; the root is the last committed token, not a node.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent, smaller than the node's own; ROOT (-1) for children
            of the root.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise InvalidParameter(
                "parents", f"has {len(self.parents)} entries for {len(self.tokens)} tokens"
            )
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise InvalidParameter("parents", f"node {node} cannot hang below {parent}")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "TokenTree":
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Tokens from below the root down to each node, its own included."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            above = () if parent == ROOT else paths[parent]
            paths.append((*above, token))
        return tuple(paths)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Nodes from below the root downwards, as far as their tokens are these."""
        path: list[int] = []
        at = ROOT
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if len(path) < len(tokens) and parent == at and token == tokens[len(path)]:
                path.append(node)
                at = node
        return tuple(path)
