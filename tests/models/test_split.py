"""Models whose list of layers looks different all run in two halves, or are refused."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    Qwen3Config,
)

from specdec_ray.errors import ConfigError
from specdec_ray.models.attention import PAGED_ATTENTION
from specdec_ray.models.packed import Segment
from specdec_ray.models.packed_model import PackedModel
from specdec_ray.models.split import SplitModel

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=99, n_embd=32, n_layer=4, n_head=4),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "qwen3": Qwen3Config(**GROUPED),
    "gemma3": Gemma3TextConfig(
        **GROUPED,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}


def packed(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=PAGED_ATTENTION)
    return PackedModel(model.eval(), block_count=8, block_size=16)


@torch.inference_mode()
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_halves_give_what_the_whole_gives(name, exit_layer):
    model = packed(name)
    split = SplitModel(model, exit_layer)
    tables = model.pool.allocate(3)
    segments = [
        Segment(tables[:2], 0, list(range(20)), logit_rows=2),
        Segment(tables[2:], 0, [7, 8, 9], logit_rows=1),
    ]
    whole = model.forward(segments)
    logits, states = split.lower(segments)
    assert logits.shape == whole.shape
    assert not torch.equal(logits, whole)
    assert torch.equal(split.upper(segments, states), whole)
    assert model.pool.free_count == 5


def test_a_half_without_layers_is_refused():
    for layer in (0, 4):
        with pytest.raises(ConfigError, match=r"in \[1, 3\]"):
            SplitModel(packed("gpt2"), layer)
