"""A transformers causal LM, unmodified, run on packed batches over a paged KV cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from specdec_ray.errors import UnsupportedModel
from specdec_ray.models.attention import PLAN_KEYWORD
from specdec_ray.models.kv_cache import BlockPool, KVCache, LayerShape, slots_of
from specdec_ray.models.lone import LonePlan
from specdec_ray.models.packed import BatchPlan, Segment
from specdec_ray.models.support import attention_layer_count, check_windows, context_length


class PackedModel:
    """The model, its KV cache and the pool of the cache's blocks.

    Args:
        model: loaded by `load_model`, so that its attention is ours.
        block_count: KV blocks; with `block_size` they size the cache.
        block_size: tokens per block.

    Raises:
        UnsupportedModel: not every layer goes through the attention seam.
    """

    def __init__(self, model: PreTrainedModel, *, block_count: int, block_size: int = 16) -> None:
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        layers = _probe(model, self.device)
        self.pool = BlockPool(block_count, block_size)
        self._cache = KVCache(layers, block_count * block_size)
        self.kv_bytes_per_token = sum(layer.bytes_per_token for layer in layers)
        self.capacity_tokens = block_count * block_size
        self.context_length = min(context_length(model.config), self.capacity_tokens)
        self.generation_config = model.generation_config
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Run the segments' tokens; write their KV; return the logits they ask for.

        Returns:
            float32 [sum of logit_rows, vocab_size], in segment order.
        """
        return self.forward_through(self.model, segments)

    def forward_through(self, model: PreTrainedModel, segments: Sequence[Segment]) -> torch.Tensor:
        """The same through a part of the model whose layers keep their places in the cache."""
        place = self._cache, self.pool.block_size, self.device
        lone = len(segments) == 1 and segments[0].tree is None
        plan = LonePlan(segments[0], *place) if lone else BatchPlan(segments, *place)
        return _run(model, plan, plan.input_ids, plan.position_ids, plan.logit_rows)

    def compact(self, table: Sequence[int], base: int, path: Sequence[int]) -> None:
        """After a tree verdict, make the accepted rows' KV contiguous from `base` on.

        Args:
            path: accepted rows of the segment, ascending; row 0 is the root.
        """
        moves = [(row, to) for to, row in enumerate(path) if row != to]
        if moves:
            slots = slots_of(table, self.pool.block_size, base + path[-1] + 1)[base:].tolist()
            self._cache.move([slots[row] for row, _ in moves], [slots[to] for _, to in moves])


class _Probe:
    """A plan that attends plainly and notes what each layer would store and how far it sees."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        if layer in self.layers:  # a second K/V of the layer would overwrite the first
            raise UnsupportedModel(f"layer {layer} attends more than once")
        self.windows[layer] = window
        self.layers[layer] = LayerShape(
            key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device
        )
        attended = functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2)


@torch.inference_mode()
def _probe(model: PreTrainedModel, device: torch.device) -> list[LayerShape]:
    """Run one token through the model and see which layers attend through our function."""
    probe = _Probe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    name = type(model).__name__
    try:
        _run(model, probe, token, token, [0])
    except (UnsupportedModel, AttributeError, TypeError) as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    expected = attention_layer_count(model.config)
    if sorted(probe.layers) != list(range(expected)):
        raise UnsupportedModel(
            f"{name}: {len(probe.layers)} of {expected} layers keep their state "
            "in attention that can be paged"
        )
    check_windows(model.config, probe.windows)
    return [probe.layers[index] for index in range(expected)]


def _run(
    model: PreTrainedModel,
    plan: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    logit_rows: list[int],
) -> torch.Tensor:
    output = model(
        input_ids=input_ids,
        position_ids=position_ids,
        use_cache=False,
        logits_to_keep=logit_rows,
        **{PLAN_KEYWORD: plan},
    )
    logits: torch.Tensor = output.logits[0].float()
    return logits
