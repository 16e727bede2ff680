"""Models that would be served wrongly without a word must not get past the probe."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DiffLlamaConfig,
    DogeConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    NemotronConfig,
    Phi3Config,
    PhimoeConfig,
)

from specdec_ray.errors import UnsupportedModel
from specdec_ray.models.attention import PAGED_ATTENTION
from specdec_ray.models.packed_model import PackedModel
from specdec_ray.models.support import UNLIMITED_CONTEXT, context_length

TINY = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
REFUSED = {
    "not causal": BertConfig(**TINY),
    "mask of its own": DogeConfig(**TINY),
    "attends more than once": DiffLlamaConfig(**TINY),
    "keyword arguments": NemotronConfig(**TINY),
    "softcap": Gemma2Config(**TINY, head_dim=8),
    "s_aux": GptOssConfig(**TINY, head_dim=8, **EXPERTS),
    "does not tell its sliding window": PhimoeConfig(**TINY, sliding_window=8, **EXPERTS),
}


def packed(config):
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PAGED_ATTENTION).eval()
    return PackedModel(model, block_count=4)


@pytest.mark.parametrize("reason", list(REFUSED))
def test_attention_that_ours_does_not_cover_is_refused(reason):
    with pytest.raises(UnsupportedModel, match=reason):
        packed(REFUSED[reason])


def test_a_window_wider_than_the_context_needs_no_telling():
    packed(PhimoeConfig(**TINY, sliding_window=64, **EXPERTS))


def test_context_is_what_the_positions_allow():
    assert context_length(LlamaConfig(**TINY)) == 64
    assert context_length(LlamaConfig(**TINY | {"max_position_embeddings": 0})) == UNLIMITED_CONTEXT


def test_longrope_stops_where_it_would_change_its_frequencies():
    """Past that length every session of the batch would get other positions."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **factors}
    config = Phi3Config(**TINY, original_max_position_embeddings=16, rope_parameters=rope)
    assert context_length(config) == 16

    model = AutoModelForCausalLM.from_config(config).eval()
    position_ids = torch.tensor([[3, 16]])
    short, long = (
        model.model.rotary_emb(torch.zeros(1), position_ids[:, :count])[0][0, 0] for count in (1, 2)
    )
    assert not torch.equal(short, long)
