"""What travels with a proposal besides its tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch


class Rule(StrEnum):
    """Acceptance rules. Greedy decoding is either rule at temperature 0."""

    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """The sparse distributions the nodes of a proposal were really drawn from.

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
