"""Sessions of one replica: leases, admission by free KV blocks, prefill in chunks.

    leased -open-> waiting -blocks promised-> prefilling -done-> ready -release-> (gone)

Both engines keep their sessions here; what happens in `ready` is theirs.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from specdec_ray.engine.grammar import Grammars, GrammarState
from specdec_ray.engine.messages import CacheHandle, Load, Open, RefusalCode, Refused
from specdec_ray.engine.outbox import Outbox, ReplySink
from specdec_ray.errors import InvalidParameter
from specdec_ray.models.packed import Segment
from specdec_ray.models.packed_model import PackedModel
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.logprobs import TokenLogprobs
from specdec_ray.speculation.proposal import Rule

MAX_SCORED_LOGITS = 2**24  # of one prefill chunk whose prompt's log-probabilities are asked for


class Phase(Enum):
    LEASED = auto()
    WAITING = auto()
    PREFILLING = auto()
    READY = auto()


@dataclass(slots=True, eq=False)
class Session:
    """State of one generation on this replica.

    Attributes:
        tokens: committed tokens.
        prompt_length: how many of them are the prompt.
        kv_length: how many tokens, from the front, have their KV in `table`.
        max_length: tokens the session may ever hold; `table` covers them all, and the scratch
            slots of a token tree.
        grammar: the session's place in its grammar, if it has one.
        prompt_logprobs: of the prompt's tokens from the second on, as far as it is prefilled.
        sink: where the reply to the request being worked on goes.
    """

    session_id: bytes
    phase: Phase = Phase.LEASED
    tokens: list[int] = field(default_factory=list)
    prompt_length: int = 0
    kv_length: int = 0
    table: list[int] = field(default_factory=list)
    max_length: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    rule: Rule = Rule.COUPLED
    grammar: GrammarState | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    sink: ReplySink | None = None

    def allowed(self, paths: Sequence[tuple[int, ...]]) -> torch.Tensor | None:
        """What the grammar allows below the committed tokens and each path, if there is one."""
        return None if self.grammar is None else self.grammar.allowed(self.tokens, paths)

    @property
    def scores_prompt(self) -> bool:
        return self.params.prompt_logprobs is not None

    def finish(self) -> ReplySink:
        """Hand out the sink of the request that has been worked on."""
        sink, self.sink = self.sink, None
        assert sink is not None, "a reply needs a request"
        return sink


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Who answers: the replica's id and the start of its process, in ns."""

    replica_id: str
    incarnation: int


class SessionTable:
    """All sessions of a replica and the KV blocks promised to them.

    Args:
        grammars: None where the model cannot follow any.
        scratch_slots: KV slots of each session beyond its longest text: of a token tree only one
            path can become text, but all its nodes have KV.

    Attributes:
        context_length: most tokens a session can ever hold here.
    """

    def __init__(
        self,
        model: PackedModel,
        identity: ReplicaIdentity,
        grammars: Grammars | None,
        *,
        scratch_slots: int,
    ) -> None:
        self._grammars = grammars
        self._scratch_slots = scratch_slots
        self.context_length = min(model.context_length, model.capacity_tokens - scratch_slots)
        self._identity = identity
        self._scored_rows = max(1, MAX_SCORED_LOGITS // model.vocab_size)
        self._pool = model.pool
        self._sessions: dict[bytes, Session] = {}
        self._waiting: deque[Session] = deque()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    @property
    def load(self) -> Load:
        return Load(waiting=len(self._waiting), free_blocks=self._pool.free_count)

    def lease(self, session_id: bytes) -> None:
        self._sessions[session_id] = Session(session_id)

    def get(self, session_id: bytes) -> Session | None:
        return self._sessions.get(session_id)

    def release(self, session_id: bytes) -> None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        if session.phase is Phase.WAITING:
            self._waiting.remove(session)
        self._pool.release(session.table)

    def open(self, session: Session, request: Open, sink: ReplySink) -> None:
        """Start over with the request's context; admission follows in FIFO order.

        Raises:
            InvalidParameter: the request's grammar is none, or none works with this model.
        """
        session.grammar = self._start_grammar(request)
        self._pool.release(session.table)
        session.table = []
        session.tokens = list(request.tokens)
        session.prompt_length = request.prompt_length
        session.kv_length = 0
        session.max_length = request.max_length
        session.params, session.rule = request.params, request.rule
        session.prompt_logprobs = []
        session.sink = sink
        session.phase = Phase.WAITING
        self._waiting.append(session)

    def _start_grammar(self, request: Open) -> GrammarState | None:
        if not request.params.grammar:
            return None
        if self._grammars is None:
            raise InvalidParameter("grammar", "this model cannot follow a grammar")
        return self._grammars.start(request.params.grammar, request.prompt_length)

    def admit(self) -> None:
        """Promise KV blocks to waiting sessions, in order, while they last."""
        while self._waiting:
            needed = self._blocks(self._waiting[0].max_length + self._scratch_slots)
            if needed > self._pool.free_count:
                return
            session = self._waiting.popleft()
            session.table = self._pool.allocate(needed)
            session.phase = Phase.PREFILLING

    def prefill_chunks(self, row_budget: int, logit_rows: int) -> list[tuple[Session, Segment]]:
        """Next chunks of the prefilling sessions, oldest first, at most `row_budget` rows.

        Args:
            logit_rows: rows of logits wanted from the chunk that ends a context; where the prompt's
                log-probabilities are asked for, those of all its rows are.
        """
        chunks = []
        for session in self:
            if session.phase is not Phase.PREFILLING or row_budget <= 0:
                continue
            rows = min(row_budget, self._scored_rows) if session.scores_prompt else row_budget
            tokens = session.tokens[session.kv_length : session.kv_length + rows]
            row_budget -= len(tokens)
            if session.scores_prompt:
                wanted = len(tokens)
            else:
                wanted = logit_rows if ends_context(session, tokens) else 0
            segment = Segment(session.table, session.kv_length, tokens, logit_rows=wanted)
            chunks.append((session, segment))
        return chunks

    def fail_active(self, outbox: Outbox, error: Exception) -> list[Session]:
        """Refuse whatever the failed step worked on; those sessions must be opened again."""
        failed = [
            session
            for session in self
            if session.sink is not None and session.phase is not Phase.WAITING
        ]
        for session in failed:
            message = f"the step failed: {type(error).__name__}"
            refused = Refused(session.session_id, RefusalCode.FAILED, message)
            outbox.put(session.finish(), refused)
            self._pool.release(session.table)
            session.table, session.phase = [], Phase.LEASED
        return failed

    def handle(self, session: Session, length: int) -> CacheHandle:
        return CacheHandle(
            session.session_id,
            self._identity.replica_id,
            self._identity.incarnation,
            epoch=0,
            length=length,
        )

    def slots(self, session: Session) -> int:
        """KV slots that the session has."""
        return len(session.table) * self._pool.block_size

    def _blocks(self, length: int) -> int:
        return -(-length // self._pool.block_size)


def ends_context(session: Session, tokens: Sequence[int]) -> bool:
    """Whether the next chunk, of these tokens, is the last of the session's context."""
    return session.kv_length + len(tokens) == len(session.tokens)
