"""Proposers without a model: what followed the last tokens before, here or in earlier outputs.

Prompt lookup: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference".
Matches in earlier outputs: Oliaro et al. 2024, "SuffixDecoding". They answer through the same port
as a draft replica, in the router's own process: a match takes less time than a message.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from specdec_ray.config import Method
from specdec_ray.engine.messages import (
    CacheHandle,
    Open,
    Opened,
    Proposal,
    Propose,
    RefusalCode,
    Refused,
    Reply,
    Request,
)
from specdec_ray.speculation.tree import TokenTree

SHORTEST_MATCH = 2  # tokens; single ones match by chance
LONGEST_MATCH = 32
PLACES_PER_KEY = 16  # latest places of one n-gram that a search looks at
MEMORY_TOKENS = 2**18  # of earlier outputs, twice: some 100 MB


@dataclass(frozen=True, slots=True)
class Match:
    """A place in a sequence.

    Attributes:
        length: tokens before `end` that equal the last ones of the text; 0 if none was found.
        end: the token there is what followed.
    """

    length: int = 0
    sequence: Sequence[int] = ()
    end: int = 0


class NGramIndex:
    """Where in some sequences each n-gram of `SHORTEST_MATCH` tokens ends."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], deque[tuple[list[int], int]]] = {}
        self.size = 0

    def add(self, sequence: list[int], start: int) -> None:
        """Index the n-grams that end behind `start` tokens or later and have a successor."""
        for end in range(max(start, SHORTEST_MATCH), len(sequence)):
            key = tuple(sequence[end - SHORTEST_MATCH : end])
            self._places.setdefault(key, deque(maxlen=PLACES_PER_KEY)).append((sequence, end))
            self.size += 1

    def longest_match(self, tokens: Sequence[int]) -> Match:
        """The place whose tokens before it agree longest with the last ones of `tokens`; of equals
        the latest."""
        best = Match()
        for sequence, end in reversed(self._places.get(tuple(tokens[-SHORTEST_MATCH:]), ())):
            length = _common_suffix(tokens, sequence, end)
            if length > best.length:
                best = Match(length, sequence, end)
        return best


class Memory:
    """Earlier outputs, the oldest forgotten: when one half is full, the other is dropped."""

    def __init__(self, tokens: int = MEMORY_TOKENS) -> None:
        self._tokens = tokens
        self._older, self._newer = NGramIndex(), NGramIndex()

    def add(self, sequence: list[int]) -> None:
        if self._newer.size >= self._tokens:
            self._older, self._newer = self._newer, NGramIndex()
        self._newer.add(sequence, 0)

    def longest_match(self, tokens: Sequence[int]) -> Match:
        return max(
            self._newer.longest_match(tokens), self._older.longest_match(tokens), key=_length
        )


class LookupSession:
    """One generation's tokens and their index; proposes chains without randomness, so that every
    acceptance rule is exact without their q."""

    def __init__(self, memory: Memory | None) -> None:
        self.session_id = secrets.token_bytes(16)
        self.tokens: list[int] = []
        self.prompt_length = 0
        self._memory = memory
        self._index = NGramIndex()

    def call(self, request: Request) -> asyncio.Future[Reply]:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        answer.set_result(self._answer(request))
        return answer

    def _answer(self, request: Request) -> Reply:
        if isinstance(request, Open):
            self.tokens, self._index = [], NGramIndex()
            self.prompt_length = request.prompt_length
            self._extend(request.tokens)
            return Opened(self._handle(), ())
        if not isinstance(request, Propose) or request.handle.length != len(self.tokens):
            message, known = "asked about other tokens", len(self.tokens)
            return Refused(self.session_id, RefusalCode.STALE_LENGTH, message, known)
        self._extend(request.tokens)
        drafted = self._continuation(min(request.budget.nodes, request.budget.depth))
        return Proposal(self._handle(), len(self.tokens), TokenTree.chain(drafted))

    def _extend(self, tokens: Sequence[int]) -> None:
        known = len(self.tokens)
        self.tokens += tokens
        self._index.add(self.tokens, known)

    def _continuation(self, count: int) -> tuple[int, ...]:
        match = self._index.longest_match(self.tokens)
        if self._memory is not None:
            match = max(match, self._memory.longest_match(self.tokens), key=_length)
        drafted = list(match.sequence[match.end : match.end + count])
        if match.sequence is self.tokens:  # a repetition goes on where the text ends
            period = len(self.tokens) - match.end
            while len(drafted) < count:
                drafted.append(drafted[-period])
        return tuple(drafted)

    def _handle(self) -> CacheHandle:
        return CacheHandle(self.session_id, "lookup", 0, 0, len(self.tokens))


class LookupPool:
    """Lookup sessions, in place of a pool of drafts.

    Args:
        memory: where outputs are remembered and looked up; None looks at a generation's own
            tokens only.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory

    @asynccontextmanager
    async def session(self) -> AsyncIterator[LookupSession]:
        session = LookupSession(self._memory)
        try:
            yield session
        finally:
            if self._memory is not None:
                # The last token of the prompt begins the n-grams that lead into the output.
                self._memory.add(session.tokens[max(session.prompt_length - SHORTEST_MATCH, 0) :])


def lookup_pool(method: Method) -> LookupPool | None:
    """The pool that proposes by this method; None if it looks nothing up."""
    if method is Method.SUFFIX:
        return LookupPool(Memory())
    return LookupPool() if method is Method.PROMPT_LOOKUP else None


def _common_suffix(tokens: Sequence[int], sequence: Sequence[int], end: int) -> int:
    """How many tokens before `end` equal the last ones of `tokens`."""
    limit = min(LONGEST_MATCH, len(tokens), end)
    length = 0
    while length < limit and tokens[-length - 1] == sequence[end - length - 1]:
        length += 1
    return length


def _length(match: Match) -> int:
    return match.length
