"""One model in two halves that share its weights and its KV cache: the first layers, read out
early, and the rest, fed with their state.

Elhoushi et al. 2024, "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding".
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec_ray.errors import ConfigError, UnsupportedModel
from specdec_ray.models.packed import Segment
from specdec_ray.models.packed_model import PackedModel
from specdec_ray.models.support import attention_layer_count

PROBE_TOKENS = 4


class SplitModel:
    """A packed model whose first `exit_layer` layers run apart from the others.

    Raises:
        ConfigError: no layer would be left for one of the halves.
        UnsupportedModel: run in two halves the model does not give what it gives as a whole.
    """

    def __init__(self, packed: PackedModel, exit_layer: int) -> None:
        count = attention_layer_count(packed.model.config)
        if not 1 <= exit_layer < count:
            raise ConfigError(f"early_exit.layer must be in [1, {count - 1}], got {exit_layer}")
        self._packed = packed
        path, layers = _find_layers(packed.model, count)
        self._tap, self._feed = _Tap(layers[exit_layer]), _Feed(layers[exit_layer - 1])
        lower = [*layers[:exit_layer], self._tap, *map(_Skip, layers[exit_layer + 1 :])]
        upper = [*map(_Skip, layers[: exit_layer - 1]), self._feed, *layers[exit_layer:]]
        self._lower = _with_layers(packed.model, path, lower)
        self._upper = _with_layers(packed.model, path, upper)
        self._check()

    def lower(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the first layers: the exit's logits of the rows that ask for them, float32 [R, V],
        and the states of all rows [N, hidden]."""
        logits = self._packed.forward_through(self._lower, segments)
        return logits, self._tap.states

    def upper(self, segments: Sequence[Segment], states: torch.Tensor) -> torch.Tensor:
        """Run the other layers over states [N, hidden] of the lower half; logits as `forward`."""
        self._feed.states = states[None]
        return self._packed.forward_through(self._upper, segments)

    @torch.inference_mode()
    def _check(self) -> None:
        tokens = list(range(PROBE_TOKENS))
        table = self._packed.pool.allocate(1)
        try:
            segments = [Segment(table, 0, tokens, logit_rows=PROBE_TOKENS)]
            whole = self._packed.forward(segments)
            halves = self.upper(segments, self.lower(segments)[1])
        except (AttributeError, TypeError, IndexError, RuntimeError) as error:
            raise UnsupportedModel(f"its layers cannot be run in two halves: {error}") from error
        finally:
            self._packed.pool.release(table)
        if not torch.equal(whole, halves):
            raise UnsupportedModel("its two halves do not give what it gives as a whole")


class _Skip(nn.Module):
    """In place of a layer that another half runs: hands its input on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Models read the kind of attention off a layer.
        own = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        vars(self).update(own)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class _Tap(_Skip):
    """Behind the lower half: keeps the state of all rows."""

    states: torch.Tensor

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.states = hidden_states[0]
        return hidden_states


class _Feed(_Skip):
    """Before the upper half: the lower half's state, whatever comes in."""

    states: torch.Tensor

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self.states


def _find_layers(model: PreTrainedModel, count: int) -> tuple[str, nn.ModuleList]:
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if len(found) != 1:
        raise UnsupportedModel(f"{type(model).__name__}: its list of layers cannot be told")
    return found[0]


def _with_layers(model: PreTrainedModel, path: str, layers: Sequence[nn.Module]) -> PreTrainedModel:
    """A view of the model with other layers; modules along the path are copied, weights are not."""
    view = top = _shallow(model)
    *parents, last = path.split(".")
    for name in parents:
        inner = _shallow(getattr(top, name))
        top._modules[name] = inner
        top = inner
    top._modules[last] = nn.ModuleList(layers)
    return view


def _shallow(module: Any) -> Any:
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
