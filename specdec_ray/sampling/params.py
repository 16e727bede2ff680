"""What a request asks of sampling. Validated here once, for every front door and the wire."""

import math
from dataclasses import dataclass

from specdec_ray.errors import InvalidParameter

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one generation.

    Attributes:
        temperature: 0 means greedy; else logits are divided by it. In [0, 100].
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches top_p. In (0, 1].
        min_p: drop tokens less probable than min_p times the most probable one. In [0, 1].
        seed: names the noise, so it names the text. In [0, 2**63).
        choice: index among the `n` choices of one request; each has its own noise.

    Raises:
        InvalidParameter: naming the field, its limit and the value.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0

    def __post_init__(self) -> None:
        _check(self.temperature, "temperature", 0, 100)
        _check(self.top_k, "top_k", 0, 2**31 - 1)
        _check(self.top_p, "top_p", 0, 1, open_low=True)
        _check(self.min_p, "min_p", 0, 1)
        _check(self.seed, "seed", 0, MAX_SEED)
        _check(self.choice, "n", 0, 2**31 - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check(value: float, field: str, low: int, high: int, *, open_low: bool = False) -> None:
    above = value > low if open_low else value >= low
    # Written so that NaN, for which every comparison is false, is refused.
    if not (above and value <= high) or math.isinf(value):
        bracket = "(" if open_low else "["
        raise InvalidParameter(field, f"must be in {bracket}{low}, {high}], got {value}")
