"""A packed ragged batch: many sessions' new tokens in one row `[1, N]`, and who attends to whom.

All indices and masks are built once per forward; a layer only gathers, attends and writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from specdec_ray.models.kv_cache import KVCache, slots_of
from specdec_ray.speculation.tree import ROOT, TokenTree

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SHORT_SEGMENT = 16  # rows up to which segments are padded into one attention call
SMALLEST_BUCKET = 256  # KV lengths up to which short segments share a call


@dataclass(frozen=True, slots=True)
class Segment:
    """One session's rows in a packed batch.

    Attributes:
        table: blocks that hold slots 0 .. end - 1.
        base: tokens whose KV is committed; the rows' KV is written from slot `base` on.
        tokens: the rows' token ids.
        tree: if set, the rows are of the root, row 0, and of the tree's nodes, row i + 1 being node
            i, which sees the context, the root and its ancestors, at position base + depth. Row r
            has slot base + r. Otherwise rows are causal.
        logit_rows: logits are wanted for that many last rows.
        rows: which rows of root and tree these are, ascending, if not all of them; the KV of those
            they see is there already.
    """

    table: Sequence[int]
    base: int
    tokens: Sequence[int]
    tree: TokenTree | None = None
    logit_rows: int = 1
    rows: Sequence[int] | None = None

    @classmethod
    def of_tree(
        cls,
        table: Sequence[int],
        base: int,
        root: int,
        tree: TokenTree,
        rows: Sequence[int],
        logit_rows: int,
    ) -> "Segment":
        """Some rows of root and tree, those of a chain by plain causal attention."""
        every = (root, *tree.tokens)
        tokens = [every[row] for row in rows]
        if tree.is_chain:
            return cls(table, base + rows[0], tokens, logit_rows=logit_rows)
        return cls(table, base, tokens, tree, logit_rows, rows)

    @property
    def end(self) -> int:
        """Slots in use behind the segment."""
        return self.base + (len(self.tokens) if self.tree is None else 1 + len(self.tree))


class AttentionPlan(Protocol):
    """What the attention function finds among a forward's keyword arguments."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Attention output [1, N, heads, value_dim] of query [1, heads, N, key_dim] and new
        key, value [1, kv_heads, N, dim]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Segments that share one attention call, padded to Q rows and L columns.

    Attributes:
        rows: [B, Q], packed row of each query; padding repeats row 0.
        valid: [B, Q], which queries are no padding.
        slots: [B, L], cache slot of each column; padding is slot 0.
        visible: [B, Q, L], who sees whom, windows aside; padding sees column 0.
        row_positions: [B, Q]; column_positions: [B, L].
    """

    rows: Ints
    valid: Bools
    slots: Ints
    visible: Bools
    row_positions: Ints
    column_positions: Ints


@dataclass(frozen=True, slots=True, eq=False)
class DeviceGroup:
    """A group's indices on one device; `rows` and `valid` are None where they change nothing."""

    rows: torch.Tensor | None
    valid: torch.Tensor | None
    slots: torch.Tensor
    shape: tuple[int, int]


class BatchPlan:
    """The plan of one packed forward.

    Attributes:
        input_ids, position_ids: int64 [1, N].
        logit_rows: packed rows whose logits are wanted, in segment order; a list because the head
            may sit on another device than the inputs, and a list indexes on any.
    """

    def __init__(
        self, segments: Sequence[Segment], cache: KVCache, block_size: int, device: torch.device
    ) -> None:
        self._cache = cache
        starts = np.cumsum([0, *(len(segment.tokens) for segment in segments)])
        positions = [_positions(segment) for segment in segments]
        own_positions = [
            own[_new(segment) - segment.base]
            for own, segment in zip(positions, segments, strict=True)
        ]
        slots = [slots_of(segment.table, block_size, segment.end) for segment in segments]
        self._groups = [
            _group(
                [segments[i] for i in members],
                [positions[i] for i in members],
                [slots[i] for i in members],
                [int(starts[i]) for i in members],
            )
            for members in _buckets(segments)
        ]
        self._new_slots = np.concatenate(
            [own[_new(segment)] for own, segment in zip(slots, segments, strict=True)]
        )
        self._in_order = len(self._groups) == 1 and bool(self._groups[0].valid.all())
        self._on: dict[torch.device, tuple[torch.Tensor, list[DeviceGroup]]] = {}
        self._masks: dict[
            tuple[torch.device, torch.dtype, int | None, int], list[torch.Tensor]
        ] = {}

        tokens = [token for segment in segments for token in segment.tokens]
        self.input_ids = torch.tensor([tokens], device=device)
        self.position_ids = torch.from_numpy(np.concatenate(own_positions))[None].to(device)
        self.logit_rows = [
            row
            for segment, end in zip(segments, starts[1:].tolist(), strict=True)
            for row in range(end - segment.logit_rows, end)
        ]

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
        new_slots, groups = self._indices(query.device)
        keys.index_copy_(0, new_slots, key[0].transpose(0, 1))
        values.index_copy_(0, new_slots, value[0].transpose(0, 1))
        heads, kv_heads = query.shape[1], keys.shape[1]
        masks = self._device_masks(query.device, query.dtype, window, heads // kv_heads)
        queries = query[0].transpose(0, 1)  # [N, heads, key_dim]
        if self._in_order:
            return _attention(queries, keys, values, groups[0], masks[0], scaling)[None]
        output = queries.new_empty(*queries.shape[:2], values.shape[2])
        for group, mask in zip(groups, masks, strict=True):
            rows = group.rows
            assert rows is not None, "only a lone full group leaves its rows out"
            attended = _attention(queries[rows], keys, values, group, mask, scaling)
            if group.valid is not None:
                attended, rows = attended[group.valid], rows[group.valid]
            output[rows] = attended
        return output[None]

    def _indices(self, device: torch.device) -> tuple[torch.Tensor, list[DeviceGroup]]:
        if device not in self._on:
            groups = [
                DeviceGroup(
                    None if self._in_order else torch.from_numpy(group.rows.reshape(-1)).to(device),
                    None
                    if group.valid.all()
                    else torch.from_numpy(group.valid.reshape(-1)).to(device),
                    torch.from_numpy(group.slots).to(device),
                    (group.rows.shape[0], group.rows.shape[1]),
                )
                for group in self._groups
            ]
            self._on[device] = torch.from_numpy(self._new_slots).to(device), groups
        return self._on[device]

    def _device_masks(
        self, device: torch.device, dtype: torch.dtype, window: int | None, sharing: int
    ) -> list[torch.Tensor]:
        """Additive masks [B, 1, sharing * Q, L]; equal for all layers of one window."""
        key = device, dtype, window, sharing
        if key not in self._masks:
            self._masks[key] = [
                _additive(group, window, dtype).to(device).repeat(1, 1, sharing, 1)
                for group in self._groups
            ]
        return self._masks[key]


def _attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: DeviceGroup,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attend from [B * Q, heads, key_dim] to the group's slots: [B * Q, heads, value_dim].

    Query heads that share a KV head are stacked as rows of it, so K and V are never repeated.
    """
    batch, length = group.shape
    heads, kv_heads = queries.shape[1], keys.shape[1]
    stacked = queries.view(batch, length, kv_heads, heads // kv_heads, -1).permute(0, 2, 3, 1, 4)
    attended = functional.scaled_dot_product_attention(
        stacked.reshape(batch, kv_heads, -1, queries.shape[2]),
        keys[group.slots].transpose(1, 2),
        values[group.slots].transpose(1, 2),
        attn_mask=mask,
        scale=scaling,
    )
    attended = attended.view(batch, kv_heads, heads // kv_heads, length, -1)
    return attended.permute(0, 3, 1, 2, 4).reshape(batch * length, heads, -1)


def _buckets(segments: Sequence[Segment]) -> list[list[int]]:
    """Which segments share an attention call: short ones whose KV is of like length."""
    buckets: dict[tuple[str, int], list[int]] = {}
    for index, segment in enumerate(segments):
        rows, length = len(segment.tokens), segment.end
        if rows > SHORT_SEGMENT:
            key = "long", index
        else:
            key = "short", max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())
        buckets.setdefault(key, []).append(index)
    return list(buckets.values())


def _positions(segment: Segment) -> Ints:
    """Positions of the slots from `base` on."""
    if segment.tree is None:
        return np.arange(segment.base, segment.end)
    return segment.base + np.array([0, *segment.tree.depths], dtype=np.int64)


def _new(segment: Segment) -> Ints:
    """The rows' slots among the session's."""
    if segment.rows is None:
        return np.arange(segment.base, segment.end)
    return segment.base + np.array(segment.rows, dtype=np.int64)


def _group(
    segments: Sequence[Segment],
    positions: Sequence[Ints],
    slots: Sequence[Ints],
    starts: Sequence[int],
) -> Group:
    batch = len(segments)
    height = max(len(segment.tokens) for segment in segments)
    width = max(len(own) for own in slots)
    columns = np.arange(width)
    group = Group(
        rows=np.zeros((batch, height), np.int64),
        valid=np.zeros((batch, height), np.bool_),
        slots=np.zeros((batch, width), np.int64),
        visible=np.zeros((batch, height, width), np.bool_),
        row_positions=np.zeros((batch, height), np.int64),
        column_positions=np.tile(columns, (batch, 1)),
    )
    for b, (segment, own_positions, own_slots, start) in enumerate(
        zip(segments, positions, slots, starts, strict=True)
    ):
        rows = len(segment.tokens)
        group.rows[b, :rows] = np.arange(start, start + rows)
        group.valid[b, :rows] = True
        group.slots[b, : len(own_slots)] = own_slots
        group.row_positions[b, :rows] = own_positions[_new(segment) - segment.base]
        group.column_positions[b, segment.base : segment.end] = own_positions
        group.visible[b, rows:, 0] = True
        if segment.tree is None:
            group.visible[b, :rows] = columns <= own_positions[:, None]
        else:
            visible = _tree_visibility(segment.base, segment.tree, width)
            group.visible[b, :rows] = visible[_new(segment) - segment.base]
    return group


def _tree_visibility(base: int, tree: TokenTree, width: int) -> Bools:
    """[1 + nodes, width]: the context and the root for every row, then each node's ancestors."""
    visible = np.zeros((1 + len(tree), width), np.bool_)
    visible[:, : base + 1] = True
    for node, parent in enumerate(tree.parents):
        if parent != ROOT:
            visible[node + 1] = visible[parent + 1]
        visible[node + 1, base + 1 + node] = True
    return visible


def _additive(group: Group, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    visible = group.visible
    if window is not None:
        near = group.column_positions[:, None, :] > group.row_positions[:, :, None] - window
        visible = visible & (near | ~group.valid[:, :, None])
    mask = torch.zeros(visible.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(~visible), -torch.inf)[:, None]
