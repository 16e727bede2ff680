"""What a model must be for its state to be paged and rolled back by length."""

from transformers import PretrainedConfig, PreTrainedModel

from specdec_ray.errors import UnsupportedModel

UNLIMITED_CONTEXT = 2**31 - 1
_PAGED_LAYERS = {"full_attention", "sliding_attention"}


def context_length(config: PretrainedConfig) -> int:
    """Positions the model knows, or UNLIMITED_CONTEXT."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        limit = getattr(text, name, None)
        if limit:
            return int(limit)
    return UNLIMITED_CONTEXT


def attention_layer_count(config: PretrainedConfig) -> int:
    return int(config.get_text_config().num_hidden_layers)


def check_config(config: PretrainedConfig) -> None:
    """Refuse what a look at the config tells.

    Raises:
        UnsupportedModel: naming the reason.
    """
    name = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder, not a causal LM")
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if foreign := sorted(layer_types - _PAGED_LAYERS):
        raise UnsupportedModel(
            f"{name} has layers whose state cannot be rolled back by length: {', '.join(foreign)}"
        )


def check_class(model_class: type[PreTrainedModel]) -> None:
    """Refuse what the model's class tells.

    Raises:
        UnsupportedModel: naming the reason.
    """
    name = model_class.__name__
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(f"{name} keeps a recurrent state, which cannot be rolled back")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} does not let its attention function be replaced")
