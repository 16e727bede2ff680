"""A generation as the round loop sees it: ids in, ids out."""

from dataclasses import dataclass, field, replace

from specdec_ray.config import RoundConfig, SpeculationConfig
from specdec_ray.errors import InvalidParameter
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.logprobs import TokenLogprobs
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import Budget

MAX_PROMPT_LOGPROBS = 2**20  # some 8 MB in one message of the round protocol


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One choice of one request.

    Attributes:
        prompt: token ids, not empty.
        params: sampling parameters, seed included.
        max_tokens: most tokens to emit, at least 1.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end the text besides the model's own end tokens.
        ignore_eos: go on after the model's end tokens.
        draft_tokens: k of every round, or None for the deployment's.
        rule: acceptance rule, or None for the deployment's.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    draft_tokens: int | None = None
    rule: Rule | None = None

    def __post_init__(self) -> None:
        count = self.params.prompt_logprobs
        values = 0 if count is None else len(self.prompt) * (1 + count)
        if values > MAX_PROMPT_LOGPROBS:
            raise InvalidParameter(
                "prompt_logprobs",
                f"limit is {MAX_PROMPT_LOGPROBS} values, got {values} of {len(self.prompt)} tokens",
            )

    def ends(self, own: frozenset[int]) -> frozenset[int]:
        """Tokens that end the text, `own` being the model's end tokens."""
        return self.stop_token_ids if self.ignore_eos else own | self.stop_token_ids

    def knowing_ends(self, own: frozenset[int]) -> "GenerationRequest":
        """The request with sampling told what `min_tokens` keeps away."""
        if not self.params.min_tokens:
            return self
        ends = tuple(sorted(self.ends(own)))
        return replace(self, params=replace(self.params, end_token_ids=ends))


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """How a deployment plays rounds.

    Attributes:
        rule: acceptance rule of requests that name none.
        draft_tokens: k of requests that name none.
        draft_timeout_s: a draft that answers later is bypassed for the round.
        self_drafting: the target drafts by itself.
    """

    rule: Rule
    draft_tokens: int
    draft_timeout_s: float
    self_drafting: bool = False

    @classmethod
    def of(cls, rounds: RoundConfig, speculation: SpeculationConfig) -> "RoundSettings":
        """What `rounds` says, in a deployment that speculates this way."""
        count = rounds.draft_tokens
        if count is None:
            count = speculation.default_draft_tokens
        return cls(rounds.rule, count, rounds.draft_timeout_s, speculation.self_drafting)

    def budget(self, request: GenerationRequest, room: int) -> Budget | None:
        """What a proposal of the request may hold where `room` drafted tokens can be emitted."""
        count = self.draft_tokens if request.draft_tokens is None else request.draft_tokens
        return None if min(count, room) < 1 else Budget(count, min(count, room))


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens of one round. The first emission of a generation comes from the prefill.

    Attributes:
        tokens: accepted tokens, then the target's own.
        proposed: drafted tokens the target was shown.
        accepted: how many of them it took.
        logprobs: one entry per token, if they were asked for.
        prompt_logprobs: one per prompt token but the first, in the first emission.
    """

    tokens: tuple[int, ...]
    proposed: int = 0
    accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class SpeculationStats:
    """Counters of one generation's rounds, cut where the text was cut.

    Attributes:
        max_draft_tokens: the largest k that rounds could use.
        per_round_accepted: accepted length of each round that proposed something.
        per_round_proposed: drafted tokens of the same rounds.
    """

    max_draft_tokens: int
    per_round_accepted: list[int] = field(default_factory=list)
    per_round_proposed: list[int] = field(default_factory=list)
