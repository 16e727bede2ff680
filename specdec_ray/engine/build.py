"""From a model's configuration to a running engine: what an actor or the library starts."""

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from specdec_ray.config import DraftConfig, ModelConfig, SpeculationConfig, TargetConfig
from specdec_ray.engine.bridge import BridgedDraft
from specdec_ray.engine.draft import DraftEngine
from specdec_ray.engine.grammar import Grammars
from specdec_ray.engine.loop import EngineThread, Steppable
from specdec_ray.engine.proposer import EarlyExitProposer, MedusaProposer, Proposer
from specdec_ray.engine.sessions import ReplicaIdentity
from specdec_ray.engine.target import TargetEngine
from specdec_ray.errors import InvalidParameter, UnsupportedModel
from specdec_ray.models.loading import id_limit, load_model, load_tokenizer, stand_in_id
from specdec_ray.models.medusa import load_medusa_heads
from specdec_ray.models.packed_model import PackedModel
from specdec_ray.models.split import SplitModel
from specdec_ray.models.translation import TokenizerPair
from specdec_ray.speculation.shape import MAX_NODES, Shape, StaticShape

logger = logging.getLogger(__name__)


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


def build_target(
    config: TargetConfig, speculation: SpeculationConfig, identity: ReplicaIdentity
) -> BuiltEngine:
    """Load the target and start its engine.

    Args:
        speculation: tells the trees that it will have to verify, and whether it drafts itself.

    Raises:
        ConfigError: the model or its heads cannot be loaded.
        UnsupportedModel: it cannot be served exactly.
    """
    model = _load(config)
    tokenizer = load_tokenizer(config.source, config.revision)
    vocab_limit = min(id_limit(tokenizer), model.vocab_size)
    ends = end_token_ids(model.generation_config, tokenizer)
    engine = TargetEngine(
        model,
        identity,
        vocab_limit=vocab_limit,
        step_tokens=config.step_tokens,
        max_nodes=MAX_NODES,
        scratch_slots=speculation.shape.scratch,
        grammars=build_grammars(tokenizer, vocab_limit, ends),
        proposer=_proposer(model, speculation, vocab_limit),
    )
    return _built(engine, "target-engine", model, tokenizer)


def _proposer(
    model: PackedModel, speculation: SpeculationConfig, vocab_limit: int
) -> Proposer | None:
    """What the target drafts with itself, if anything."""
    shape, medusa, early_exit = speculation.shape, speculation.medusa, speculation.early_exit
    if medusa is not None:
        embeddings = model.model.get_output_embeddings().weight
        heads = load_medusa_heads(
            medusa.heads,
            hidden=embeddings.shape[1],
            vocab=model.vocab_size,
            dtype=embeddings.dtype,
            device=embeddings.device,
            revision=medusa.revision,
            allow_pickle=medusa.allow_pickle,
        )
        return MedusaProposer(model, heads, shape, vocab_limit)
    if early_exit is not None:
        assert isinstance(shape, StaticShape), "the configuration refuses others"
        return EarlyExitProposer(SplitModel(model, early_exit.layer), shape, vocab_limit)
    return None


def build_draft(
    config: DraftConfig, target: TargetConfig, shape: Shape, identity: ReplicaIdentity
) -> BuiltEngine:
    """Load the draft and start its engine, behind a bridge if its tokenizer is another one.

    Args:
        shape: of the trees that it proposes.

    Raises:
        ConfigError: the model cannot be loaded.
        UnsupportedModel: it cannot be served exactly, or the tokenizers cannot be bridged.
    """
    tokenizer = load_tokenizer(config.source, config.revision)
    target_tokenizer = load_tokenizer(target.source, target.revision)
    difference = first_difference(target_tokenizer, tokenizer)
    pair = None if difference is None else _bridge(target_tokenizer, tokenizer, difference)
    model = _load(config)
    vocab_limit = min(id_limit(tokenizer), model.vocab_size)
    grammars = None
    if pair is None:
        vocab_limit = min(vocab_limit, id_limit(target_tokenizer))
        ends = end_token_ids(model.generation_config, tokenizer)
        # The grammar follows what the target emits, so it has to know all of the target's ids.
        grammars = build_grammars(target_tokenizer, vocab_limit, ends)
    unknown_id = stand_in_id(tokenizer)
    draft = DraftEngine(
        model,
        identity,
        # A bridged text has chains only: of a tree's branches few would survive the translation.
        shape=shape if pair is None else StaticShape.chain(MAX_NODES),
        vocab_limit=vocab_limit,
        unknown_id=unknown_id if unknown_id < vocab_limit else 0,
        step_tokens=config.step_tokens,
        grammars=grammars,
    )
    return _built(
        draft if pair is None else BridgedDraft(draft, pair), "draft-engine", model, tokenizer
    )


def first_difference(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """The first id that means another token to the draft, in words. A draft may know fewer ids."""
    target_tokens, draft_tokens = _by_id(target), _by_id(draft)
    for token_id, (expected, found) in enumerate(zip(target_tokens, draft_tokens, strict=False)):
        if expected != found and None not in (expected, found):
            return (
                f"token id {token_id} is {expected!r} for the target and {found!r} for the draft "
                f"(vocabularies of {len(target_tokens)} and {len(draft_tokens)})"
            )
    return None


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
    tokenizer: PreTrainedTokenizerBase, vocab_limit: int, ends: Collection[int]
) -> Grammars | None:
    """Grammars over the ids that a model may choose from, if the tokenizer permits any."""
    try:
        return Grammars(tokenizer, vocab_limit, sorted(ends))
    except InvalidParameter as error:
        logger.warning("no structured output with this model: %s", error)
        return None


def set_threads(threads: int) -> None:
    """Give this process's torch that many threads."""
    torch.set_num_threads(threads)


def _bridge(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, difference: str
) -> TokenizerPair:
    try:
        pair = TokenizerPair(target, draft)
    except UnsupportedModel as error:
        message = f"the draft's tokenizer is not the target's and cannot be bridged: {difference}"
        raise UnsupportedModel(f"{message}; {error}") from error
    logger.warning(
        "the draft's tokenizer is not the target's, so every round translates text, and drafts are "
        "accepted less often: %s",
        difference,
    )
    return pair


def _by_id(tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    return list(tokenizer.convert_ids_to_tokens(list(range(id_limit(tokenizer)))))


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
    engine: Steppable,
    name: str,
    model: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> BuiltEngine:
    return BuiltEngine(
        thread=EngineThread(engine, name),
        tokenizer=tokenizer,
        context_length=engine.sessions.context_length,
        end_token_ids=end_token_ids(model.generation_config, tokenizer),
    )
