"""The attention function that transformers models call; what it does is the plan's business."""

from typing import Any

import torch
from transformers import AttentionInterface

from specdec_ray.errors import UnsupportedModel
from specdec_ray.models.packed import AttentionPlan

PAGED_ATTENTION = "specdec_paged"
PLAN_KEYWORD = "packed_plan"

# Terms that some models add to the scores and that the plan does not know.
_UNKNOWN_TERMS = ("softcap", "s_aux", "position_bias")


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """What it would get wrong, it refuses; the probe at load runs every layer through here."""
    if PLAN_KEYWORD not in keywords:
        raise UnsupportedModel("it does not hand keyword arguments down to its attention")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel("its attention is not causal")
    if attention_mask is not None:
        raise UnsupportedModel("its attention brings a mask of its own, which is not supported")
    for term in _UNKNOWN_TERMS:
        if keywords.get(term) is not None:
            raise UnsupportedModel(f"its attention uses {term}, which is not supported")
    plan: AttentionPlan = keywords[PLAN_KEYWORD]
    layer: int = module.layer_idx  # type: ignore[assignment]
    return plan.attend(layer, query, key, value, scaling, sliding_window), None


# No mask function is registered under the name, so transformers builds no mask of its own.
AttentionInterface.register(PAGED_ATTENTION, _paged_attention)
