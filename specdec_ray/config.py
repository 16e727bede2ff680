"""The one configuration model: the `args` of a Serve config whose import path is
`specdec_ray.serve:build_app`. Unknown keys and impossible combinations are refused at start.

Where replicas run and how many there are is Serve's own business: set `num_replicas`,
`ray_actor_options` and `autoscaling_config` of `Target`, `Draft` and `Router` under `deployments:`.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdec_ray import bundled
from specdec_ray.errors import ConfigError, InvalidParameter
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import MAX_NODES, DynamicShape, Shape, StaticShape

BUNDLED_TARGET = "bundled/target"
BUNDLED_DRAFT = "bundled/draft"

DEFAULT_CHAIN = 5

Positive = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Method(StrEnum):
    """What proposes tokens.

    draft_model: the draft replicas. prompt_lookup: what followed the last tokens earlier in prompt
    and output; no model. suffix: that, or in outputs of earlier requests at the same router, so
    that how fast a text comes may tell whether its like was generated before. medusa: trained heads
    on the target's last state. early_exit: the target's own first layers. none: nothing, the target
    decodes plainly.
    """

    DRAFT_MODEL = "draft_model"
    MEDUSA = "medusa"
    EARLY_EXIT = "early_exit"
    PROMPT_LOOKUP = "prompt_lookup"
    SUFFIX = "suffix"
    NONE = "none"


class ModelConfig(Strict):
    """A model and the memory and threads of the actor that runs it."""

    model: str = Field(
        description="Hugging Face id or folder of a causal LM in safetensors; 'bundled/target' and "
        "'bundled/draft' name the pair that comes with the package."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Weights and KV cache; 'auto' takes what the checkpoint says. A target's texts "
        "do not depend on the load in float32; in the others near ties may. See README.",
    )
    device: str = Field("auto", description="'cpu', 'cuda', 'cuda:1'; 'auto' is CUDA if there.")
    device_map: str | dict[str, int | str] | None = Field(
        None, description="transformers' device_map, for a model over several GPUs of one actor."
    )
    kv_cache_tokens: Positive = Field(16_384, description="Tokens whose KV fits the cache.")
    block_size: Positive = Field(16, description="Tokens per KV block.")
    step_tokens: Positive = Field(
        512, description="Rows of a packed step that prefill chunks may fill up to."
    )
    max_sessions: Positive = Field(64, description="Sessions a replica holds, waiting ones too.")
    threads: Positive | None = Field(
        None, description="torch threads; None takes the actor's num_cpus, at least 1."
    )

    @property
    def source(self) -> str:
        """Folder or hub id with the bundled names resolved."""
        folders = {BUNDLED_TARGET: bundled.TARGET, BUNDLED_DRAFT: bundled.DRAFT}
        return str(folders.get(self.model, self.model))

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.device_map is not None and self.device != "auto":
            raise ValueError("device and device_map exclude each other: leave device at 'auto'")
        if self.kv_cache_tokens < 2 * self.block_size:
            raise ValueError(
                f"kv_cache_tokens ({self.kv_cache_tokens}) must hold two blocks of block_size "
                f"({self.block_size})"
            )
        return self


class TargetConfig(ModelConfig):
    """The model whose distribution is served."""

    model: str = Field(BUNDLED_TARGET, description="See ModelConfig.model.")
    served_name: str | None = Field(
        None, description="Name clients ask for; None takes the last part of `model`."
    )

    @property
    def name(self) -> str:
        return self.served_name or self.model.rstrip("/").rsplit("/", 1)[-1]


class DraftConfig(ModelConfig):
    """The cheaper model that proposes, at its best one that shares the target's token ids."""

    model: str = Field(BUNDLED_DRAFT, description="See ModelConfig.model.")


class RoundConfig(Strict):
    """How rounds are played. May change while serving, as Router's `user_config`."""

    rule: Rule = Field(
        Rule.COUPLED,
        description="Acceptance rule of requests that name none. coupled, rejection and block are "
        "exact, typical is lossy. See README, 'Exactness'.",
    )
    draft_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_NODES,
        description="k: most tokens drafted per round, 0 decodes plainly; None is "
        f"{DEFAULT_CHAIN}, or a whole tree where there is one.",
    )
    draft_timeout_s: float = Field(
        1.0, gt=0, description="A draft that answers later than this is bypassed for the round."
    )


class DynamicTreeConfig(Strict):
    """A tree of what the draft is surest of, in each context anew."""

    width: int = Field(ge=1, le=16, description="Nodes of a level that get children, and how many.")
    depth: int = Field(ge=1, le=MAX_NODES, description="Levels.")
    nodes: int = Field(ge=1, le=MAX_NODES, description="Most nodes that are proposed.")


class TreeConfig(Strict):
    """Shape of the token trees that are proposed: one of the three."""

    branching: list[Positive] | None = Field(
        None, description="Children of every node, depth by depth: [3, 2] has 3 + 6 nodes."
    )
    choices: list[list[int]] | None = Field(
        None, description="Each node's ranks on its path, like Medusa's medusa_choices."
    )
    dynamic: DynamicTreeConfig | None = Field(None, description="See DynamicTreeConfig.")

    @property
    def shape(self) -> Shape:
        if self.dynamic is not None:
            return DynamicShape(self.dynamic.width, self.dynamic.depth, self.dynamic.nodes)
        if self.branching is not None:
            return StaticShape.branching(self.branching)
        return StaticShape(tuple(map(tuple, self.choices or ())))

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("a tree is given by one of branching, choices and dynamic")
        try:
            nodes = self.shape.nodes
        except InvalidParameter as error:
            raise ValueError(str(error)) from error
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"a tree has 1 to {MAX_NODES} nodes, not {nodes}")
        return self


class MedusaConfig(Strict):
    """Heads that draft from the target's last state (Cai et al. 2024)."""

    heads: str = Field(
        description="Hugging Face id or folder with config.json and medusa_lm_head.safetensors."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    allow_pickle: bool = Field(
        False, description="Take medusa_lm_head.pt too, read as plain tensors only."
    )


class EarlyExitConfig(Strict):
    """The target's first layers as its draft (Elhoushi et al. 2024, LayerSkip)."""

    layer: Positive = Field(
        description="Layers that a drafted token goes through; their last state is read by the "
        "model's own last norm and head, as LayerSkip checkpoints are trained for."
    )


class SpeculationConfig(RoundConfig):
    """What proposes, and how rounds are played at start."""

    method: Method = Field(
        Method.DRAFT_MODEL,
        description="What proposes tokens: draft_model, medusa, early_exit, prompt_lookup, suffix "
        "or none. See Method.",
    )
    tree: TreeConfig | None = Field(None, description="None proposes chains. See TreeConfig.")
    medusa: MedusaConfig | None = Field(None, description="Of method medusa.")
    early_exit: EarlyExitConfig | None = Field(None, description="Of method early_exit.")

    @property
    def uses_draft(self) -> bool:
        return self.method is Method.DRAFT_MODEL

    @property
    def self_drafting(self) -> bool:
        return self.method in (Method.MEDUSA, Method.EARLY_EXIT)

    @property
    def shape(self) -> Shape:
        """Of all proposals; a chain is cut to the tokens asked for."""
        return StaticShape.chain(MAX_NODES) if self.tree is None else self.tree.shape

    @property
    def default_draft_tokens(self) -> int:
        return DEFAULT_CHAIN if self.tree is None else self.shape.nodes

    @property
    def rounds(self) -> RoundConfig:
        return RoundConfig(**self.model_dump(include=set(RoundConfig.model_fields)))

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.tree is not None and self.method in (
            Method.PROMPT_LOOKUP,
            Method.SUFFIX,
            Method.NONE,
        ):
            raise ValueError(f"method '{self.method}' proposes no trees: remove tree")
        for method, section in (
            (Method.MEDUSA, self.medusa),
            (Method.EARLY_EXIT, self.early_exit),
        ):
            if (self.method is method) != (section is not None):
                fault = "is missing" if section is None else f"is of no use to '{self.method}'"
                raise ValueError(f"the section of method '{method}' {fault}")
        if self.method is Method.EARLY_EXIT and isinstance(self.shape, DynamicShape):
            raise ValueError("method 'early_exit' takes a static tree: branching or choices")
        return self


class RouterConfig(Strict):
    """The front door."""

    grpc_host: str = Field("127.0.0.1", description="Address the gRPC service binds.")
    grpc_port: int = Field(9000, ge=0, le=65535, description="Its port; 0 takes a free one.")
    max_generations: Positive = Field(
        256, description="Generations in flight per router replica; one more is refused (429)."
    )
    lease_timeout_s: float = Field(
        30.0, gt=0, description="Longest wait for an engine replica with room for a session."
    )


class LimitsConfig(Strict):
    """Most that one request may ask for; more is refused with 400 / INVALID_ARGUMENT."""

    max_body_bytes: Positive = Field(4 * 2**20, description="HTTP body and gRPC message, bytes.")
    max_prompt_bytes: Positive = Field(2**20, description="Prompt text before tokenising, bytes.")
    max_tokens: Positive = Field(4096, description="Tokens a choice may emit.")
    max_choices: Positive = Field(16, description="`n` of a request.")
    max_prompts: Positive = Field(64, description="Prompts of one completions request.")
    max_stop_strings: Positive = Field(16, description="Stop strings of a request.")
    max_stop_chars: Positive = Field(256, description="Characters of one stop string.")


class ObservabilityConfig(Strict):
    """Logs."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Level of the service's own loggers."
    )
    log_encoding: Literal["TEXT", "JSON"] = Field("TEXT", description="Format of replica logs.")


class SpecdecConfig(Strict):
    """The whole service."""

    target: TargetConfig = Field(default_factory=TargetConfig)
    draft: DraftConfig | None = Field(
        default_factory=DraftConfig, description="Used by speculation.method 'draft_model' only."
    )
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    observability: ObservabilityConfig = Field(default_factory=ObservabilityConfig)

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.speculation.uses_draft and self.draft is None:
            raise ValueError("speculation.method 'draft_model' needs a draft")
        if (
            not self.speculation.uses_draft
            and self.draft is not None
            and "draft" in self.model_fields_set
        ):
            raise ValueError(
                f"speculation.method '{self.speculation.method}' runs no draft: remove the draft "
                "section"
            )
        return self


def parse_config(args: dict[str, Any]) -> SpecdecConfig:
    """Validate the `args` of a Serve config.

    Raises:
        ConfigError: one line per fault, each with the dotted path of the field.
    """
    try:
        return SpecdecConfig.model_validate(args)
    except ValidationError as error:
        lines = (
            f"{'.'.join(map(str, fault['loc'])) or 'args'}: {fault['msg']}, "
            f"got {fault['input']!r:.80}"
            for fault in error.errors()
        )
        raise ConfigError("invalid configuration:\n  " + "\n  ".join(lines)) from None
