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
# A hair below 2**-53: the largest 53-bit word plus a half rounds to 2**53, and w must stay below 1.
_UNIT = 2.0**-53 * (1 - 2.0**-53)
_PURPOSE_BITS = 8


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
    key = _mix_(seeds + _GAMMA)
    key = _mix_(key ^ ((choices << _PURPOSE_BITS) + int(purpose)) * _GAMMA)
    return _mix_(key + positions * _GAMMA)


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
    return _unit_(keys[:, None] + (token_ids + 1) * _GAMMA).neg_().log1p_().neg_()


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """One uniform number in (0, 1) per key: float64 of the keys' shape."""
    return _unit_(keys + _GAMMA)


def subkeys(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Keys of independent streams below each key: int64, arguments broadcast."""
    return _mix_(keys + (counters + 1) * _GAMMA)


def _unit_(state: torch.Tensor) -> torch.Tensor:
    return _shift(_mix_(state), 11).double().add_(0.5).mul_(_UNIT)


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, in place: fresh temporaries of a whole vocabulary took longer."""
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift(x, 31))


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; int64's own is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
