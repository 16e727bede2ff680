"""Loading models and tokenizers: safetensors only, and never code from a model's repository."""

from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdec_ray.errors import ConfigError, UnsupportedModel
from specdec_ray.models.attention import PAGED_ATTENTION
from specdec_ray.models.support import check_class, check_config


def load_config(source: str, revision: str | None = None) -> PretrainedConfig:
    """The model's configuration.

    Raises:
        ConfigError: no such model, in one line.
        UnsupportedModel: a model that cannot be served exactly.
    """
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"model {source!r}: the folder has no config.json")
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {source!r}: {_first_line(error)}") from error
    check_config(config)
    return config


def load_model(
    source: str,
    *,
    dtype: torch.dtype | str,
    device: str,
    device_map: str | dict[str, int | str] | None = None,
    revision: str | None = None,
) -> PreTrainedModel:
    """Load a causal LM whose attention goes through ours.

    Args:
        source: Hugging Face id or folder.
        device: used where `device_map` is None.

    Raises:
        ConfigError: the model is missing, damaged, or not in safetensors.
        UnsupportedModel: it cannot be served exactly.
    """
    config = load_config(source, revision)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel(f"{config.model_type} is not a causal LM")
    check_class(model_class)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            revision=revision,
            dtype=dtype,
            device_map=device_map,
            attn_implementation=PAGED_ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except Exception as error:  # safetensors, hub and torch each raise their own
        raise ConfigError(f"model {source!r}: {_first_line(error)}") from error
    return (model if device_map is not None else model.to(device)).eval()


def load_tokenizer(source: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        ConfigError: there is none.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer of {source!r}: {_first_line(error)}") from error
    return tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
