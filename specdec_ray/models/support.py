"""What a model must be for its state to be paged and rolled back by length."""

from collections.abc import Mapping

from transformers import PretrainedConfig, PreTrainedModel

from specdec_ray.errors import UnsupportedModel

UNLIMITED_CONTEXT = 2**31 - 1
_PAGED_LAYERS = {"full_attention", "sliding_attention"}


def context_length(config: PretrainedConfig) -> int:
    """Positions the model knows and that mean the same in every batch, or UNLIMITED_CONTEXT.

    LongRoPE (Ding et al. 2024) as transformers runs it takes other frequencies for the whole batch
    as soon as one position passes the pre-training length. That would turn the KV already written
    wrong, and one session's length would change another's text; so that length is the limit.
    """
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    ropes = getattr(text, "rope_parameters", None) or {}
    limits += [
        rope["original_max_position_embeddings"]
        for rope in (ropes, *ropes.values())  # flat, or one for each type of layer
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope"
    ]
    return min((int(limit) for limit in limits if limit), default=UNLIMITED_CONTEXT)


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


def check_windows(config: PretrainedConfig, windows: Mapping[int, int | None]) -> None:
    """Refuse a model whose attention calls do not tell the windows that its config asks for.

    Some models leave a sliding window to the mask alone, which ours replaces.

    Args:
        windows: what each layer handed to the attention function.

    Raises:
        UnsupportedModel: naming the first such layer.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if not window or window >= context_length(config):
        return
    for layer, found in windows.items():
        types = getattr(text, "layer_types", None)
        sliding = types is None or types[layer] == "sliding_attention"
        if sliding != (found is not None):
            raise UnsupportedModel(
                f"{config.model_type}: layer {layer} does not tell its sliding window ({window})"
            )
