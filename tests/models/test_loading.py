import json

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from specdec_ray.errors import ConfigError, UnsupportedModel
from specdec_ray.models.loading import load_model, load_tokenizer


def load(path):
    return load_model(str(path), dtype=torch.float32, device="cpu")


@pytest.fixture
def saved(make_llama, tmp_path):
    make_llama().save_pretrained(tmp_path)
    return tmp_path


def test_loads_for_our_attention(saved):
    model = load(saved)
    assert isinstance(model, LlamaForCausalLM)
    assert not model.training


def test_missing_model_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no/such") as error:
        load(tmp_path / "no/such")
    assert "\n" not in str(error.value)


def test_folder_without_config(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(tmp_path)


def test_truncated_weights(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=str(saved)):
        load(saved)


def test_pickled_weights_are_never_read(saved, make_llama):
    (saved / "model.safetensors").unlink()
    torch.save(make_llama().state_dict(), saved / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=str(saved)):
        load(saved)


def test_code_from_the_repository_never_runs(saved):
    marker = saved / "ran"
    (saved / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((saved / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    config["model_type"] = "evil"
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError):
        load(saved)
    assert not marker.exists()


def test_missing_tokenizer(saved):
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(str(saved))


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
REFUSED = {
    "recurrent": (MambaForCausalLM, MambaConfig(**TINY, state_size=4), "cannot be rolled back"),
    "alibi": (BloomForCausalLM, BloomConfig(vocab_size=50, hidden_size=32, n_layer=2), "attention"),
    "encoder_decoder": (
        T5ForConditionalGeneration,
        T5Config(vocab_size=50, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16),
        "encoder-decoder",
    ),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_models_that_cannot_be_exact_are_refused_with_the_reason(kind, tmp_path):
    model_class, config, reason = REFUSED[kind]
    model_class(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path)
