"""The round: propose, verify, emit. This loop is the whole protocol as a router plays it.

Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding", with
draft and target behind ports, so that the same loop runs in one process and across a cluster.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TypeVar

from specdec_ray.engine.messages import Open, Opened, RefusalCode, Refused, Reply, Verdict, Verify
from specdec_ray.errors import EngineLost, Overloaded, SpecdecError
from specdec_ray.rounds.drafter import Drafter
from specdec_ray.rounds.ports import EnginePool, EngineSession
from specdec_ray.rounds.request import Emission, GenerationRequest, RoundSettings

logger = logging.getLogger(__name__)

MAX_REOPENS_WITHOUT_PROGRESS = 3
REOPEN_DELAY_S = 0.1

R = TypeVar("R", Opened, Verdict)


async def generate(
    request: GenerationRequest,
    targets: EnginePool,
    drafts: EnginePool | None,
    settings: RoundSettings,
) -> AsyncGenerator[Emission, None]:
    """Emit the tokens of one generation, round by round, at most `request.max_tokens`.

    The committed tokens kept here are all the state there is: a lost draft is bypassed, a lost
    target is replaced by opening prompt and emitted tokens elsewhere. End tokens and stop strings
    are the consumer's: it closes the generator, which closes the sessions.

    Raises:
        Overloaded: the targets take no more sessions.
        EngineLost: targets were lost repeatedly without a token in between.
    """
    committed = list(request.prompt)
    end = len(committed) + request.max_tokens
    losses = 0
    async with Drafter(drafts, request, settings) as drafter:
        while len(committed) < end:
            try:
                async with targets.session() as target:
                    opened = await _open(target, request, committed, end)
                    request = _without_prompt_logprobs(request)  # not again after a loss
                    handle, round_number = opened.handle, 0
                    committed += opened.emitted
                    losses = 0
                    yield Emission(
                        opened.emitted,
                        logprobs=opened.logprobs,
                        prompt_logprobs=opened.prompt_logprobs,
                    )
                    while len(committed) < end:
                        room = end - len(committed) - 1
                        proposal = await drafter.propose(committed, room)
                        round_number += 1
                        verify = Verify(
                            handle,
                            round_number,
                            len(committed),
                            proposal.tree,
                            proposal.draft_probs,
                            settings.budget(request, room) if settings.self_drafting else None,
                        )
                        verdict = _expect(Verdict, await target.call(verify))
                        handle = verdict.handle
                        committed += verdict.emitted
                        await drafter.ask(committed, end - len(committed) - 1)
                        yield Emission(
                            verdict.emitted,
                            verdict.proposed,
                            verdict.accepted,
                            verdict.logprobs,
                        )
            except EngineLost as loss:
                losses += 1
                if losses > MAX_REOPENS_WITHOUT_PROGRESS:
                    raise
                logger.warning("target lost, opening %d tokens again: %s", len(committed), loss)
                await asyncio.sleep(REOPEN_DELAY_S * losses)


async def _open(
    target: EngineSession, request: GenerationRequest, committed: list[int], end: int
) -> Opened:
    assert request.rule is not None, "the caller settles the rule"
    reply = await target.call(
        Open(
            target.session_id,
            tuple(committed),
            request.params,
            request.rule,
            max_length=end,
            prompt_length=len(request.prompt),
        )
    )
    return _expect(Opened, reply)


def _without_prompt_logprobs(request: GenerationRequest) -> GenerationRequest:
    return replace(request, params=replace(request.params, prompt_logprobs=None))


def _expect(kind: type[R], reply: Reply) -> R:
    """The reply, or the error its refusal means to a generation."""
    if isinstance(reply, kind):
        return reply
    if not isinstance(reply, Refused):
        raise EngineLost(f"expected {kind.__name__}, got {type(reply).__name__}")
    if reply.code is RefusalCode.BUSY:
        raise Overloaded(reply.message, reply.retry_after_s or 1.0)
    if reply.code is RefusalCode.INVALID:
        raise SpecdecError(f"the target refused: {reply.message}")
    raise EngineLost(f"{reply.code}: {reply.message}")
