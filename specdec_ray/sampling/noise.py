"""Counter-based noise: the same bits on every device, whatever else runs there.

A row's key is a pure function of (seed, choice, absolute position, purpose); a token's noise is
the SplitMix64 output (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators")
with the key as the stream's state and the token id as the counter. Everything is wrap-around int64
arithmetic until the last step, so CPUs and GPUs agree to the bit; device generators do not.
"""

from enum import IntEnum

import torch

_GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


class Purpose(IntEnum):
    """What noise is for. Draws for different purposes never share bits."""

    COUPLED = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def row_keys(
    seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor, purpose: Purpose
) -> torch.Tensor:
    """Keys of rows. All tensors int64 [N]."""
    key = _mix(seeds + _GAMMA)
    key = _mix(key ^ (choices * len(Purpose) + int(purpose)) * _GAMMA)
    return _mix(key + positions * _GAMMA)


def exponential(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Exp(1) noise of each token in each row.

    53 bits of the hash make w in (0, 1) and E = -log1p(-w), which keeps small E, the ones that
    win, finely resolved: with 24 bits, as float32 gives, one position in a hundred of a large
    vocabulary emits a random tail token.

    Args:
        keys: int64 [N].
        token_ids: int64 [N, S] or [S].

    Returns:
        float64 [N, S], positive and finite.
    """
    return -torch.log1p(-_unit(keys[:, None] + token_ids * _GAMMA))


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """One uniform number in (0, 1) per row: float64 [N]."""
    return _unit(keys)


def _unit(state: torch.Tensor) -> torch.Tensor:
    bits = _shift(_mix(state + _GAMMA), 11)
    return (bits.double() + 0.5) * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; int64's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
