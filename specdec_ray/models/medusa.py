"""Medusa heads: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple
Decoding Heads". Reads the layout in which FasterDecoding publishes them."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.utils import cached_file

from specdec_ray.errors import ConfigError
from specdec_ray.models.loading import one_line

WEIGHTS = "medusa_lm_head.safetensors"
PICKLED_WEIGHTS = "medusa_lm_head.pt"


class ResBlock(nn.Module):
    """x + SiLU(linear(x)), [..., hidden] to the same."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + functional.silu(self.linear(states))


class MedusaHeads(nn.ModuleList):
    """Head i reads the state that chose a token and predicts the token i + 1 places after it."""

    def __init__(self, heads: int, layers: int, hidden: int, vocab: int) -> None:
        super().__init__(
            nn.Sequential(
                *(ResBlock(hidden) for _ in range(layers)), nn.Linear(hidden, vocab, bias=False)
            )
            for _ in range(heads)
        )

    @classmethod
    def on(cls, output: torch.Tensor, heads: int) -> "MedusaHeads":
        """Untrained heads that predict what the output embedding [V, hidden] does."""
        vocab, hidden = output.shape
        fresh = cls(heads, 1, hidden, vocab)
        start = {"0.linear.weight": 0.0, "0.linear.bias": 0.0, "1.weight": output.detach()}
        with torch.no_grad():
            for name, parameter in fresh.named_parameters():
                parameter.copy_(torch.as_tensor(start[name.split(".", 1)[1]]))
        return fresh


def load_medusa_heads(
    source: str,
    *,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    revision: str | None = None,
    allow_pickle: bool = False,
) -> MedusaHeads:
    """Load published heads for a target of this hidden size and vocabulary.

    Raises:
        ConfigError: they are missing, damaged, made for another target, or pickled and that is
            not allowed.
    """
    try:
        config, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        weights = _weights(source, revision, allow_pickle)
    except ConfigError:
        raise
    except Exception as error:  # hub, safetensors and pickle each raise their own
        raise ConfigError(f"medusa heads {source!r}: {one_line(error)}") from error
    # Checkpoints hold heads that were trained beyond those that are used.
    count, layers = config.get("medusa_num_heads"), config.get("medusa_num_layers", 1)
    if not isinstance(count, int) or not isinstance(layers, int) or min(count, layers) < 1:
        raise ConfigError(f"medusa heads {source!r}: config.json gives no medusa_num_heads")
    with torch.device("meta"):
        heads = MedusaHeads(count, layers, hidden, vocab)
    expected = heads.state_dict()
    for name, parameter in expected.items():
        if name not in weights:
            raise ConfigError(f"medusa heads {source!r}: {name} is missing")
        if weights[name].shape != parameter.shape:
            raise ConfigError(
                f"medusa heads {source!r}: {name} is {list(weights[name].shape)}, "
                f"this target needs {list(parameter.shape)}"
            )
    own = {name: weights[name].to(device, dtype) for name in expected}
    heads.load_state_dict(own, assign=True)
    return heads.eval()


def _weights(source: str, revision: str | None, allow_pickle: bool) -> dict[str, torch.Tensor]:
    path = _find(source, WEIGHTS, revision)
    weights: dict[str, Any]
    if path is not None:
        weights = load_file(path)
    else:
        pickled = _find(source, PICKLED_WEIGHTS, revision)
        if pickled is None:
            raise ConfigError(f"medusa heads {source!r}: there is no {WEIGHTS}")
        if not allow_pickle:
            raise ConfigError(
                f"medusa heads {source!r}: only {PICKLED_WEIGHTS}, a pickle, which is read with "
                "allow_pickle only"
            )
        weights = torch.load(pickled, map_location="cpu", weights_only=True)
    return {re.sub("^medusa_head[.]", "", name): tensor for name, tensor in weights.items()}


def _find(source: str, name: str, revision: str | None) -> Path | None:
    found = cached_file(
        source,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return None if found is None else Path(found)
