import json

import pytest
import torch
from safetensors.torch import load_file, save_file
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
    with pytest.raises(ConfigError, match=r"no/such.*no such folder") as error:
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


@pytest.mark.parametrize("fault", ["missing", "misshapen"])
def test_incomplete_weights_are_never_filled_with_random_numbers(saved, fault):
    weights = load_file(saved / "model.safetensors")
    tensor = weights.pop(name := "model.layers.1.mlp.up_proj.weight")
    if fault == "misshapen":
        weights[name] = tensor[1:].clone()
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=name):
        load(saved)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "not a valid JSON"), ('{"model_type": "llama", "hidden_size": "x"}', "hidden_size")],
)
def test_damaged_config_is_one_line(saved, content, reason):
    (saved / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=reason) as error:
        load(saved)
    assert "\n" not in str(error.value)


def test_device_that_is_not_there(saved):
    with pytest.raises(ConfigError, match=str(saved)):
        load_model(str(saved), dtype="auto", device="cuda:99")


def test_pickled_weights_are_never_read(saved, make_llama):
    (saved / "model.safetensors").unlink()
    torch.save(make_llama().state_dict(), saved / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=str(saved)):
        load(saved)


@pytest.mark.parametrize("model_type", ["evil", "llama"])
def test_code_from_the_repository_never_runs(saved, model_type):
    marker = saved / "ran"
    (saved / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((saved / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    config["model_type"] = model_type
    (saved / "config.json").write_text(json.dumps(config))
    if model_type == "llama":  # a type that transformers knows is loaded by its own code
        assert isinstance(load(saved), LlamaForCausalLM)
    else:
        with pytest.raises(ConfigError):
            load(saved)
    assert not marker.exists()


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_missing_or_damaged_tokenizer(saved, content):
    if content is not None:
        (saved / "tokenizer.json").write_text(content)
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (saved / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
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
