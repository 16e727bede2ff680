"""The generation service behind both front doors: admission, rounds, text."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from specdec_ray.config import LimitsConfig, RoundConfig, SpeculationConfig
from specdec_ray.engine.grammar import Grammars
from specdec_ray.errors import Overloaded, SpecdecError
from specdec_ray.rounds.generate import generate
from specdec_ray.rounds.ports import EnginePool
from specdec_ray.rounds.request import Emission, GenerationRequest, RoundSettings
from specdec_ray.rounds.text import Delta, TextStream, stream_text
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.serve.metrics import RouterMetrics

READY_TIMEOUT_S = 10.0
READY_FOR_S = 1.0  # how long a good answer stands: probes must not load the engines


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may know of the model, and what requests are checked against.

    Attributes:
        context_length: tokens that a prompt and its completion may have together.
        vocab_size: number of token ids.
        grammars: None if the model cannot follow any.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: frozenset[int]
    context_length: int
    vocab_size: int
    grammars: Grammars | None

    def token_bytes(self, token: int) -> bytes:
        """What a token spells: part of a character, maybe."""
        if self.grammars is not None:
            return self.grammars.token_bytes(token)
        return str(self.tokenizer.decode([token])).encode()


class GenerationService:
    """Runs generations on pools of targets and drafts.

    Args:
        drafts: None decodes plainly.
        max_generations: choices in flight; one more is refused.
    """

    def __init__(
        self,
        model: ServedModel,
        targets: EnginePool,
        drafts: EnginePool | None,
        speculation: SpeculationConfig,
        limits: LimitsConfig,
        max_generations: int,
    ) -> None:
        self.model = model
        self.limits = limits
        self.metrics = RouterMetrics()
        self.active_generations = 0
        self._targets, self._drafts = targets, drafts
        self.max_generations = max_generations
        self._ready_until = 0.0
        self._speculation = speculation
        self.reconfigure(speculation)

    def reconfigure(self, rounds: RoundConfig) -> None:
        """Change how later generations play their rounds."""
        self._settings = RoundSettings.of(rounds, self._speculation)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Deltas of one choice; closing the generator frees everything it holds.

        Raises:
            Overloaded: too much is in flight here, or the targets are full.
            EngineLost: targets were lost repeatedly.
        """
        if self.active_generations >= self.max_generations:
            self.metrics.refused.inc()
            raise Overloaded(f"{self.max_generations} generations are in flight already")
        request = self._settled(request)
        assert request.draft_tokens is not None
        text = TextStream(
            self.model.tokenizer, request, self.model.end_token_ids, request.draft_tokens
        )
        rounds = self.metrics.observed(self._rounds(request), request)
        self.active_generations += 1
        try:
            async with aclosing(stream_text(rounds, text)) as deltas:
                async for delta in deltas:
                    self._ready_until = time.monotonic() + READY_FOR_S
                    yield delta
        finally:
            self.active_generations -= 1

    async def not_ready_reason(self) -> str | None:
        """None if a token can be generated now, else why not. Busy is ready: tokens that clients
        got lately are proof enough, so a probe never queues behind a load."""
        if time.monotonic() < self._ready_until:
            return None
        probe = GenerationRequest((0,), SamplingParams(temperature=0), max_tokens=1)
        rounds = self._rounds(self._settled(probe))
        try:
            async with asyncio.timeout(READY_TIMEOUT_S), aclosing(rounds):
                await anext(rounds)
        except Overloaded:
            return None
        except TimeoutError:
            return f"no token within {READY_TIMEOUT_S:g} s"
        except SpecdecError as error:
            return str(error)
        self._ready_until = time.monotonic() + READY_FOR_S
        return None

    def _rounds(self, request: GenerationRequest) -> AsyncGenerator[Emission, None]:
        return generate(request, self._targets, self._drafts, self._settings)

    def _settled(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the deployment's choices where it makes none."""
        settings = self._settings
        draft_tokens = 0
        if self._drafts is not None or settings.self_drafting:
            asked = request.draft_tokens
            draft_tokens = settings.draft_tokens if asked is None else asked
        request = replace(request, rule=request.rule or settings.rule, draft_tokens=draft_tokens)
        return request.knowing_ends(self.model.end_token_ids)
