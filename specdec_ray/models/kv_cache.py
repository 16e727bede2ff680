"""A paged KV cache: fixed blocks of token slots, handed out to sequences in any order.

Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specdec_ray.errors import SpecdecError


class OutOfBlocks(SpecdecError):
    """Fewer free blocks than asked for."""


class BlockPool:
    """Which blocks are free. Pure bookkeeping."""

    def __init__(self, block_count: int, block_size: int) -> None:
        self.block_count = block_count
        self.block_size = block_size
        self._free = list(reversed(range(block_count)))
        self._used: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks.

        Raises:
            OutOfBlocks: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block is not in use.
        """
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"block {block} is not in use")
            self._used.remove(block)
            self._free.append(block)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token, found by running it."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class KVCache:
    """Keys and values of every layer, [slots, kv_heads, head_dim] each."""

    def __init__(self, layers: Sequence[LayerShape], slot_count: int) -> None:
        self.keys = [
            torch.zeros(slot_count, s.kv_heads, s.key_dim, dtype=s.dtype, device=s.device)
            for s in layers
        ]
        self.values = [
            torch.zeros(slot_count, s.kv_heads, s.value_dim, dtype=s.dtype, device=s.device)
            for s in layers
        ]

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy slots of every layer; sources are read before destinations are written."""
        for store in (*self.keys, *self.values):
            store[list(destination)] = store[list(source)]


def slots_of(table: Sequence[int], block_size: int, length: int) -> npt.NDArray[np.int64]:
    """Slots of positions 0..length-1 of the sequence whose blocks are `table`: int64 [length]."""
    blocks = np.asarray(table[: -(-length // block_size)], dtype=np.int64)
    slots = blocks[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1)[:length]
