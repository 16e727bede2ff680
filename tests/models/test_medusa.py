import json

import pytest
import torch
from safetensors.torch import save_file

from specdec_ray.errors import ConfigError
from specdec_ray.models.medusa import MedusaHeads, load_medusa_heads

HIDDEN, VOCAB = 8, 11
PUBLISHED = ["0.0.linear.bias", "0.0.linear.weight", "0.1.weight"]


@pytest.fixture
def heads():
    torch.manual_seed(0)
    return MedusaHeads(2, 1, HIDDEN, VOCAB)


@pytest.fixture
def folder(tmp_path):
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def load(folder, **changes):
    options = {"hidden": HIDDEN, "vocab": VOCAB, "dtype": torch.float32, "device": "cpu"}
    return load_medusa_heads(str(folder), **{**options, **changes})


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_published_heads_load(heads, folder, prefix):
    weights = heads.state_dict()
    assert sorted(name for name in weights if name.startswith("0.")) == PUBLISHED
    save_file(
        {prefix + name: tensor for name, tensor in weights.items()},
        folder / "medusa_lm_head.safetensors",
    )
    loaded = load(folder)
    states = torch.randn(3, HIDDEN)
    for own, other in zip(heads, loaded, strict=True):
        block, output = own
        expected = output(states + torch.nn.functional.silu(block.linear(states)))
        assert torch.equal(other(states), expected)


def test_a_pickle_is_taken_only_if_allowed(heads, folder):
    torch.save(heads.state_dict(), folder / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match="allow_pickle"):
        load(folder)
    assert torch.equal(load(folder, allow_pickle=True)[1][1].weight, heads[1][1].weight)


def test_a_pickle_never_runs_code(folder, tmp_path):
    ran = tmp_path / "ran"

    class Hostile:
        def __reduce__(self):
            return ran.touch, ()

    torch.save({"0.1.weight": Hostile()}, folder / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match="medusa heads"):
        load(folder, allow_pickle=True)
    assert not ran.exists()


def test_heads_of_another_target_are_refused(heads, folder):
    save_file(heads.state_dict(), folder / "medusa_lm_head.safetensors")
    with pytest.raises(ConfigError, match=r"this target needs \[12, 8\]"):
        load(folder, vocab=12)


def test_missing_heads_are_named(folder):
    with pytest.raises(ConfigError, match="there is no medusa_lm_head"):
        load(folder)
    save_file({"0.1.weight": torch.zeros(VOCAB, HIDDEN)}, folder / "medusa_lm_head.safetensors")
    with pytest.raises(ConfigError, match="is missing"):
        load(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="medusa_num_heads"):
        load(folder)
    with pytest.raises(ConfigError, match="medusa heads"):
        load("/nowhere/at/all")
