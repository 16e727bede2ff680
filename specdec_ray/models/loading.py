"""Loading models and tokenizers: safetensors only, and never code from a model's repository."""

from pathlib import Path
from textwrap import shorten
from typing import Any

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
    _check_path(source)
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ConfigError(f"model {source!r}: the folder has no config.json")
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:  # a field of the wrong type raises the hub's own kinds
        raise ConfigError(f"model {source!r}: {one_line(error)}") from error
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
        ConfigError: the model is missing, damaged, incomplete, or not in safetensors; or there is
            no such device.
        UnsupportedModel: it cannot be served exactly.
    """
    config = load_config(source, revision)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel(f"{config.model_type} is not a causal LM")
    check_class(model_class)
    model: PreTrainedModel
    report: dict[str, Any]
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            revision=revision,
            dtype=dtype,
            device_map=device_map,
            attn_implementation=PAGED_ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported by name instead, see _check_report
            output_loading_info=True,
        )
        if device_map is None:
            model.to(device)
    except Exception as error:  # safetensors, hub and torch each raise their own
        raise ConfigError(f"model {source!r}: {one_line(error)}") from error
    _check_report(source, report)
    return model.eval()


def load_trainable_model(source: str) -> PreTrainedModel:
    """The frozen model in float32 as it was published, its attention its own.

    Raises:
        ConfigError: as `load_model`.
    """
    model = load_model(source, dtype=torch.float32, device="cpu")
    model.set_attn_implementation("sdpa")
    return model.requires_grad_(False)


def load_tokenizer(source: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        ConfigError: there is none.
    """
    _check_path(source)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
    except Exception as error:  # tokenizers raises plain Exception, a damaged file KeyError
        raise ConfigError(f"tokenizer of {source!r}: {one_line(error)}") from error
    return tokenizer


def id_limit(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the tokenizer's last id; its `len` is less where ids have holes."""
    return 1 + max(map(int, tokenizer.get_vocab().values()))


def stand_in_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """An id that says nothing: the unknown token's, else a line break's."""
    if tokenizer.unk_token_id is not None:
        return int(tokenizer.unk_token_id)
    return next(reversed(tokenizer.encode("\n", add_special_tokens=False)), 0)


def _check_path(source: str) -> None:
    """What can only be a path must exist; the hub's own message would be about repository names."""
    if (source.startswith((".", "/", "~")) or source.count("/") > 1) and not Path(source).exists():
        raise ConfigError(f"model {source!r}: there is no such folder")


def _check_report(source: str, report: dict[str, Any]) -> None:
    """Tensors that the weights do not give are random numbers, which transformers only logs."""
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    if faulty := sorted(report["missing_keys"] | mismatched):
        raise ConfigError(
            f"model {source!r}: missing in its weights, or not of the shape that its config says: "
            f"{shorten(', '.join(faulty), 200)}"
        )


def one_line(error: Exception) -> str:
    """What other libraries have to say, fit for a message of ours."""
    return f"{type(error).__name__}: {shorten(str(error), 300)}"
