"""What travels with a proposal besides its tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch


class Rule(StrEnum):
    """Acceptance rules. Greedy decoding is any of them at temperature 0."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"
    TYPICAL = "typical"  # lossy: its texts do not have the target's distribution

    @property
    def lossless(self) -> bool:
        """Whether texts are distributed as the target alone would write them."""
        return self is not Rule.TYPICAL

    @property
    def needs_draft_probs(self) -> bool:
        """Whether the rule weighs the laws that nodes were drawn from."""
        return self in (Rule.REJECTION, Rule.BLOCK)


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """The sparse distributions the nodes of a proposal were really drawn from.

    Siblings are drawn without replacement from one distribution, which each of them names: the
    rule itself takes out the siblings before a node.

    Attributes:
        ids: int64 [nodes, m], token ids of the support.
        probs: float32 [nodes, m], their probabilities; each row sums to one, padding is zero.
    """

    ids: torch.Tensor
    probs: torch.Tensor

    @classmethod
    def stack(cls, rows: Sequence["DraftProbs"]) -> "DraftProbs":
        """Rows of one width, one below the other."""
        return cls(torch.cat([row.ids for row in rows]), torch.cat([row.probs for row in rows]))


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """The nodes below each of N rows, at most B, in the order they are tried.

    Attributes:
        tokens: int64 [N, B], -1 where there is none.
        nodes: int64 [N, B], each child's row in `draft`; any where there is none.
        draft: what the nodes were drawn from.
    """

    tokens: torch.Tensor
    nodes: torch.Tensor
    draft: DraftProbs
