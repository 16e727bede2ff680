"""The plan of a forward over one causal segment: what a single stream's rounds are made of.

A small draft's forward takes about a millisecond, of which the general plan's padding, masks and
gathers were a quarter. Here nothing is padded, one row needs no mask, and blocks that follow each
other are read as a slice.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from specdec_ray.models.kv_cache import KVCache, slots_of
from specdec_ray.models.packed import Segment

Slots = slice | torch.Tensor


class LonePlan:
    """See `BatchPlan`, whose attributes it shares."""

    def __init__(
        self, segment: Segment, cache: KVCache, block_size: int, device: torch.device
    ) -> None:
        rows = len(segment.tokens)
        self._cache = cache
        self._base, self._end = segment.base, segment.base + rows
        self._slots = _slots(segment.table, block_size, self._end)
        self._masks: dict[tuple[torch.device, int | None, int], torch.Tensor | None] = {}
        self.input_ids = torch.tensor([list(segment.tokens)], device=device)
        self.position_ids = torch.arange(self._base, self._end, device=device)[None]
        self.logit_rows = list(range(rows - segment.logit_rows, rows))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        known = self._slots_on(query.device)
        heads, kv_heads = query.shape[1], keys.shape[1]
        # Query heads that share a KV head are stacked as rows of it.
        stacked = query.reshape(1, kv_heads, -1, query.shape[3])
        attended = functional.scaled_dot_product_attention(
            stacked,
            _write_and_read(keys, known, self._base, key),
            _write_and_read(values, known, self._base, value),
            attn_mask=self._mask(query.device, window, heads // kv_heads),
            scale=scaling,
        )
        return attended.view(1, heads, -1, attended.shape[3]).transpose(1, 2)

    def _slots_on(self, device: torch.device) -> Slots:
        if isinstance(self._slots, torch.Tensor) and self._slots.device != device:
            self._slots = self._slots.to(device)
        return self._slots

    def _mask(self, device: torch.device, window: int | None, sharing: int) -> torch.Tensor | None:
        """Who sees whom, [sharing * rows, columns]; None where one row sees every column."""
        key = device, window, sharing
        if key not in self._masks:
            columns = torch.arange(self._end, device=device)
            positions = torch.arange(self._base, self._end, device=device)[:, None]
            visible = columns <= positions
            if window is not None:
                visible &= columns > positions - window
            all_seen = len(positions) == 1 and (window is None or window >= self._end)
            self._masks[key] = None if all_seen else visible.repeat(sharing, 1)
        return self._masks[key]


def _slots(table: Sequence[int], block_size: int, length: int) -> Slots:
    """Cache slots of the sequence's positions, as a slice if its blocks follow each other."""
    blocks = table[: -(-length // block_size)]
    if all(block == blocks[0] + offset for offset, block in enumerate(blocks)):
        start = blocks[0] * block_size
        return slice(start, start + length)
    return torch.from_numpy(slots_of(table, block_size, length))


def _write_and_read(
    store: torch.Tensor, slots: Slots, base: int, new: torch.Tensor
) -> torch.Tensor:
    """Put `new` [1, kv_heads, rows, dim] behind position `base`; all the sequence has, likewise
    [1, kv_heads, columns, dim]."""
    if isinstance(slots, slice):
        known = store[slots]
        known[base:] = new[0].transpose(0, 1)
    else:
        store.index_copy_(0, slots[base:], new[0].transpose(0, 1))
        known = store.index_select(0, slots)
    return known.transpose(0, 1)[None]
