"""The draft side of a generation. Losing it costs speed only, so nothing here raises."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from specdec_ray.engine.messages import (
    CacheHandle,
    Open,
    Opened,
    Proposal,
    Propose,
    RefusalCode,
    Refused,
    Reply,
)
from specdec_ray.errors import EngineLost, Overloaded
from specdec_ray.rounds.ports import EnginePool, EngineSession
from specdec_ray.rounds.request import GenerationRequest, RoundSettings
from specdec_ray.speculation.tree import TokenTree

logger = logging.getLogger(__name__)

MAX_TIMEOUTS_IN_A_ROW = 2


class Drafter:
    """Asks a draft replica for proposals; proposes nothing when it cannot.

    Opening starts at once and runs beside the target's prefill. A draft that is slow is bypassed
    for the round; one that is lost or refuses for good is given up for this generation.

    Args of `ask` and `propose`:
        committed: all tokens of the generation so far.
        room: most drafted tokens that can be emitted.
    """

    def __init__(
        self, drafts: EnginePool | None, request: GenerationRequest, settings: RoundSettings
    ) -> None:
        drafting = settings.budget(request, request.max_tokens - 1) is not None
        self._pool = drafts if drafting else None
        self._request, self._settings = request, settings
        self._timeout_s = settings.draft_timeout_s
        self._stack = AsyncExitStack()
        self._session: EngineSession | None = None
        self._handle: CacheHandle | None = None
        self._opening: asyncio.Task[None] | None = None
        self._asked: asyncio.Future[Reply] | None = None
        self._timeouts = 0

    async def __aenter__(self) -> Self:
        if self._pool is not None:
            self._opening = asyncio.create_task(self._open(self._pool))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close()

    async def ask(self, committed: list[int], room: int) -> None:
        """Ask a draft that is ready for what `propose` will be asked for next.

        It drafts while the caller is busy with the text of the last round.
        """
        if self._session is None or room < 1:
            return
        try:
            self._asked = self._send(self._session, committed, room)
        except EngineLost as loss:
            await self._give_up(str(loss))
        else:
            await asyncio.sleep(0)  # the message leaves before the caller goes on

    async def propose(self, committed: list[int], room: int) -> Proposal:
        """A proposal on top of `committed`; empty where there is none."""
        if self._opening is None or room < 1:
            return _nothing(committed)
        if self._timeouts and not self._opening.done():
            return _nothing(committed)  # waited for once; it joins when it is ready
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self._opening.done():
                    await asyncio.shield(self._opening)
                proposal = await self._answer(committed, room)
                self._timeouts = 0
                return proposal
        except TimeoutError:
            self._timeouts += 1
            if self._timeouts == MAX_TIMEOUTS_IN_A_ROW:
                await self._give_up(f"no answer within {self._timeout_s:g} s, repeatedly")
        except EngineLost as loss:
            await self._give_up(str(loss))
        return _nothing(committed)

    async def _open(self, pool: EnginePool) -> None:
        """Lease and prefill; leaves no session behind when the draft cannot take it."""
        try:
            session = await self._stack.enter_async_context(pool.session())
            request = self._request
            assert request.rule is not None, "the caller settles the rule"
            reply = await session.call(
                Open(
                    session.session_id,
                    request.prompt,
                    request.params,
                    request.rule,
                    max_length=len(request.prompt) + request.max_tokens,
                    prompt_length=len(request.prompt),
                )
            )
        except Exception as error:  # whatever it is, the target can do without
            known = isinstance(error, (EngineLost, Overloaded))
            logger.warning("no draft for this generation: %s", error, exc_info=not known)
            return
        if isinstance(reply, Opened):
            self._session, self._handle = session, reply.handle
        else:
            logger.warning("no draft for this generation: %s", reply)
            await self._stack.aclose()

    def _send(
        self, session: EngineSession, committed: list[int], room: int
    ) -> asyncio.Future[Reply]:
        assert self._handle is not None, "set with the session"
        missing = tuple(committed[self._handle.length :])
        budget = self._settings.budget(self._request, room)
        assert budget is not None, "no session is opened where nothing is drafted"
        return session.call(Propose(self._handle, missing, budget))

    async def _answer(self, committed: list[int], room: int) -> Proposal:
        if self._session is None:
            return _nothing(committed)
        asked, self._asked = self._asked, None
        reply = await (asked or self._send(self._session, committed, room))
        if isinstance(reply, Proposal):
            if reply.base_length == len(committed):
                self._handle = reply.handle
                return reply
        elif isinstance(reply, Refused):
            if reply.code is RefusalCode.STALE_LENGTH:
                assert self._handle is not None, "set with the session"
                self._handle = replace(self._handle, length=reply.known_length)
            elif reply.code is not RefusalCode.BUSY:  # busy: still at the round it was late for
                await self._give_up(reply.message)
        return _nothing(committed)

    async def _give_up(self, reason: str) -> None:
        logger.warning("going on without the draft: %s", reason)
        await self._close()

    async def _close(self) -> None:
        opening, self._opening = self._opening, None
        asked, self._asked = self._asked, None
        self._session = self._handle = None
        if asked is not None:
            asked.cancel()
        if opening is not None:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        await self._stack.aclose()


def _nothing(committed: list[int]) -> Proposal:
    return Proposal(_NO_HANDLE, len(committed), TokenTree())


_NO_HANDLE = CacheHandle(b"", "", 0, 0, 0)
