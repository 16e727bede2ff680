"""From a model's configuration to a running engine: what an actor or the library starts."""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from itertools import zip_longest

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from specdec_ray.config import DraftConfig, ModelConfig, TargetConfig
from specdec_ray.engine.draft import DraftEngine
from specdec_ray.engine.grammar import Grammars
from specdec_ray.engine.loop import EngineThread
from specdec_ray.engine.sessions import ReplicaIdentity
from specdec_ray.engine.target import TargetEngine
from specdec_ray.errors import InvalidParameter, UnsupportedModel
from specdec_ray.models.loading import load_model, load_tokenizer
from specdec_ray.models.packed_model import PackedModel

logger = logging.getLogger(__name__)

MAX_NODES = 64


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A running engine and what others must know of it.

    Attributes:
        context_length: most tokens a session of it can hold.
        end_token_ids: tokens that end a text, as the model's generation config says.
    """

    thread: EngineThread
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    end_token_ids: frozenset[int]


def build_target(config: TargetConfig, identity: ReplicaIdentity) -> BuiltEngine:
    """Load the target and start its engine.

    Raises:
        ConfigError: the model cannot be loaded.
        UnsupportedModel: it cannot be served exactly.
    """
    model = _load(config)
    tokenizer = load_tokenizer(config.source, config.revision)
    engine = TargetEngine(
        model,
        identity,
        vocab_limit=min(len(tokenizer), model.vocab_size),
        step_tokens=config.step_tokens,
        max_nodes=MAX_NODES,
        grammars=build_grammars(
            tokenizer, model.vocab_size, end_token_ids(model.generation_config, tokenizer)
        ),
    )
    return _built(engine, "target-engine", model, tokenizer)


def build_draft(
    config: DraftConfig, target: TargetConfig, identity: ReplicaIdentity
) -> BuiltEngine:
    """Load the draft, check that it shares the target's token ids, and start its engine.

    Raises:
        ConfigError: the model cannot be loaded.
        UnsupportedModel: it cannot be served exactly, or its tokenizer is another one.
    """
    tokenizer = load_tokenizer(config.source, config.revision)
    target_tokenizer = load_tokenizer(target.source, target.revision)
    check_same_ids(target_tokenizer, tokenizer)
    model = _load(config)
    engine = DraftEngine(
        model,
        identity,
        vocab_limit=min(len(tokenizer), len(target_tokenizer), model.vocab_size),
        step_tokens=config.step_tokens,
        grammars=build_grammars(
            tokenizer, model.vocab_size, end_token_ids(model.generation_config, tokenizer)
        ),
    )
    return _built(engine, "draft-engine", model, tokenizer)


def check_same_ids(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Refuse a draft whose ids mean other tokens than the target's. A draft may know fewer.

    Raises:
        UnsupportedModel: naming the first id that differs.
    """
    target_tokens, draft_tokens = _by_id(target), _by_id(draft)
    for token_id, (expected, found) in enumerate(zip_longest(target_tokens, draft_tokens)):
        if found is None or expected is None:
            return  # a shorter vocabulary: the ids in common agree
        if expected != found:
            raise UnsupportedModel(
                f"the draft's tokenizer is not the target's: token id {token_id} is {expected!r} "
                f"for the target and {found!r} for the draft (vocabularies of "
                f"{len(target_tokens)} and {len(draft_tokens)})"
            )


def end_token_ids(
    config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """The end tokens of the generation config, else the tokenizer's own."""
    ends = config.eos_token_id if config is not None else None
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)


def build_grammars(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, ends: Collection[int]
) -> Grammars | None:
    """Grammars over a model's real ids, if its tokenizer permits any."""
    try:
        return Grammars(tokenizer, min(len(tokenizer), vocab_size), sorted(ends))
    except InvalidParameter as error:
        logger.warning("no structured output with this model: %s", error)
        return None


def set_threads(threads: int) -> None:
    """Give this process's torch that many threads."""
    torch.set_num_threads(threads)


def _by_id(tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    return list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))


def _load(config: ModelConfig) -> PackedModel:
    model = load_model(
        config.source,
        dtype=config.dtype,
        device=_device(config),
        device_map=config.device_map,
        revision=config.revision,
    )
    packed = PackedModel(
        model,
        block_count=config.kv_cache_tokens // config.block_size,
        block_size=config.block_size,
    )
    logger.info(
        "%s on %s: KV for %d tokens, %d bytes each",
        config.model,
        packed.device,
        packed.capacity_tokens,
        packed.kv_bytes_per_token,
    )
    return packed


def _device(config: ModelConfig) -> str:
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _built(
    engine: TargetEngine | DraftEngine,
    name: str,
    model: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> BuiltEngine:
    return BuiltEngine(
        thread=EngineThread(engine, name),
        tokenizer=tokenizer,
        context_length=model.context_length,
        end_token_ids=end_token_ids(model.generation_config, tokenizer),
    )
