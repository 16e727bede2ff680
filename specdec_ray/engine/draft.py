"""The draft engine: many sessions' trees grow together, one level a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, takewhile

import torch

from specdec_ray.engine.grammar import Grammars
from specdec_ray.engine.growing import draw_rows, start_growth
from specdec_ray.engine.messages import (
    Close,
    Open,
    Opened,
    Proposal,
    Propose,
    RefusalCode,
    Refused,
    Request,
)
from specdec_ray.engine.outbox import Outbox, ReplySink
from specdec_ray.engine.sessions import Phase, ReplicaIdentity, Session, SessionTable
from specdec_ray.engine.validation import check_open, check_tokens, refuse
from specdec_ray.errors import InvalidParameter
from specdec_ray.models.packed import Segment
from specdec_ray.models.packed_model import PackedModel
from specdec_ray.speculation.shape import Growth, Shape
from specdec_ray.speculation.step import draw
from specdec_ray.speculation.tree import ROOT, TokenTree

MAX_TARGET_IDS = 2**31  # a target may know more ids than its draft


@dataclass(slots=True)
class Drafting:
    """A tree as it grows.

    Attributes:
        fed: its nodes whose KV is in the cache, behind the last committed token's, in this order.
    """

    growth: Growth
    fed: list[int] = field(default_factory=list)

    @property
    def fed_tree(self) -> TokenTree:
        place = {ROOT: ROOT} | {node: at for at, node in enumerate(self.fed)}
        return TokenTree(
            tuple(self.growth.tokens[node] for node in self.fed),
            tuple(place[self.growth.parents[node]] for node in self.fed),
        )


class DraftEngine:
    """Sessions on the draft model; see `Steppable` for who calls what.

    Draft state is soft. The KV of drafted tokens is kept until the next Propose tells which of
    them were right; the wrong ones are rolled back by setting the session's `kv_length`.

    Args:
        shape: of the trees it proposes, each within the budget of its request.
        vocab_limit: number of token ids target and draft share; only these are proposed.
        unknown_id: fed to the model in place of the ids that it does not share.
    """

    def __init__(
        self,
        model: PackedModel,
        identity: ReplicaIdentity,
        *,
        shape: Shape,
        vocab_limit: int,
        unknown_id: int,
        step_tokens: int,
        grammars: Grammars | None = None,
    ) -> None:
        self._model = model
        self._shape = shape
        self.sessions = SessionTable(model, identity, grammars, scratch_slots=shape.scratch)
        self._vocab_limit = vocab_limit
        self._unknown_id = unknown_id
        self._step_tokens = step_tokens
        self._drafting: dict[Session, Drafting] = {}
        self._last: dict[Session, TokenTree] = {}

    def release(self, session_id: bytes) -> None:
        session = self.sessions.get(session_id)
        if session is not None:
            self._forget(session)
            self.sessions.release(session_id)

    def accept(self, request: Request, sink: ReplySink, outbox: Outbox) -> None:
        if isinstance(request, Close):
            self.release(request.session_id)
            return
        if isinstance(request, Open):
            refused = self._take_open(request, sink)
        elif isinstance(request, Propose):
            refused = self._take_propose(request, sink)
        else:
            session_id = request.handle.session_id
            refused = refuse(session_id, RefusalCode.INVALID, "a draft does not verify")
        if refused is not None:
            outbox.put(sink, refused)

    def step(self, outbox: Outbox) -> bool:
        self.sessions.admit()
        work = self._segments()
        chunks = self.sessions.prefill_chunks(
            self._step_tokens - sum(len(segment.tokens) for _, segment in work), logit_rows=0
        )
        if not work and not chunks:
            return False
        logits = self._model.forward([self._known(segment) for _, segment in work + chunks])
        for session, segment in work + chunks:
            if session.kv_length < len(session.tokens):  # else the rows are of drafted nodes
                session.kv_length += len(segment.tokens)
        drawing = [session for session, segment in work if segment.logit_rows]
        self._draw(logits, drawing, outbox)
        for session, _ in chunks:
            if session.kv_length == len(session.tokens):
                session.phase = Phase.READY
                handle = self.sessions.handle(session, len(session.tokens))
                outbox.put(session.finish(), Opened(handle, ()))
        return True

    def fail_pending(self, outbox: Outbox, error: Exception) -> None:
        for session in self.sessions.fail_active(outbox, error):
            self._forget(session)

    def _take_open(self, request: Open, sink: ReplySink) -> Refused | None:
        session = self.sessions.get(request.session_id)
        context = self.sessions.context_length
        # A context shorter than the target's is drafted in as far as it goes.
        request = replace(
            request,
            max_length=min(request.max_length, context),
            params=replace(request.params, prompt_logprobs=None),
        )
        refused = check_open(session, request, context, MAX_TARGET_IDS)
        if refused is None:
            assert session is not None
            self._forget(session)
            try:
                self.sessions.open(session, request, sink)
            except InvalidParameter as error:
                return refuse(request.session_id, RefusalCode.INVALID, str(error))
        return refused

    def _take_propose(self, request: Propose, sink: ReplySink) -> Refused | None:
        session = self.sessions.get(request.handle.session_id)
        if session is None or session.phase is Phase.LEASED:
            return refuse(
                request.handle.session_id, RefusalCode.UNKNOWN_SESSION, "no such session here"
            )
        known, length = len(session.tokens), request.handle.length + len(request.tokens)
        budget = request.budget
        if session.sink is not None:
            code, message = RefusalCode.BUSY, "a request of this session is under way"
        elif request.handle.length > known or length == 0:
            code, message = RefusalCode.STALE_LENGTH, f"{known} tokens are known here"
        elif min(budget.nodes, budget.depth) < 1 or length + budget.depth > session.max_length:
            code = RefusalCode.INVALID
            message = f"{length} + {budget.depth} tokens do not fit {session.max_length}"
        elif fault := check_tokens(request.tokens, MAX_TARGET_IDS):
            code, message = RefusalCode.INVALID, fault
        else:
            self._catch_up(session, request)
            session.sink = sink
            self._drafting[session] = Drafting(start_growth(session, self._shape, budget))
            return None
        return refuse(session.session_id, code, message, known)

    def _catch_up(self, session: Session, request: Propose) -> None:
        """Take the committed tokens in, keeping the KV of what was drafted right."""
        start, drafted = request.handle.length, self._last.pop(session, TokenTree())
        known = session.tokens[start:]
        same = _common_prefix(known, request.tokens)
        if same < len(known):
            session.kv_length = min(session.kv_length, start + same)
        elif path := drafted.follow(request.tokens[same:]):
            rows = (0, *(node + 1 for node in path))
            root = len(session.tokens) - 1
            self._model.compact(session.table, root, rows)
            session.kv_length = root + len(rows)
        session.tokens[start:] = request.tokens
        # The last committed token is always fed: its row is where the first draw happens.
        session.kv_length = min(session.kv_length, len(session.tokens) - 1)

    def _segments(self) -> list[tuple[Session, Segment]]:
        """The next rows of every session that is drafting: what it missed, or the nodes that get
        children next."""
        work, budget = [], self._step_tokens
        for session, drafting in self._drafting.items():
            missed = session.tokens[session.kv_length :]
            if missed:
                tokens = missed[: max(budget, 1)]
                draws = int(len(tokens) == len(missed))
                segment = Segment(session.table, session.kv_length, tokens, logit_rows=draws)
            else:
                segment = _next_level(session, drafting)
            budget -= len(segment.tokens)
            work.append((session, segment))
        return work

    def _known(self, segment: Segment) -> Segment:
        """The segment as the model can read it; the session keeps the ids as they are."""
        if max(segment.tokens) < self._vocab_limit:
            return segment
        tokens = [
            token if token < self._vocab_limit else self._unknown_id for token in segment.tokens
        ]
        return replace(segment, tokens=tokens)

    def _draw(self, logits: torch.Tensor, sessions: Sequence[Session], outbox: Outbox) -> None:
        if not sessions:
            return
        rows = [draw_rows(session, self._drafting[session].growth) for session in sessions]
        drawn = iter(draw(logits, list(chain(*rows)), vocab_limit=self._vocab_limit))
        for session, own in zip(sessions, rows, strict=True):
            growth = self._drafting[session].growth
            growth.extend(list(islice(drawn, len(own))))
            if not growth.sprouts:
                self._propose(session, self._drafting.pop(session), outbox)

    def _propose(self, session: Session, drafting: Drafting, outbox: Outbox) -> None:
        self._last[session] = drafting.fed_tree
        length = len(session.tokens)
        tree, probs = drafting.growth.proposal()
        handle = self.sessions.handle(session, length)
        outbox.put(session.finish(), Proposal(handle, length, tree, probs))

    def _forget(self, session: Session) -> None:
        self._drafting.pop(session, None)
        self._last.pop(session, None)


def _next_level(session: Session, drafting: Drafting) -> Segment:
    """The rows of the nodes that get children next; they are fed from now on."""
    first = 1 + len(drafting.fed)
    drafting.fed += [sprout.node for sprout in drafting.growth.sprouts]
    rows = range(first, 1 + len(drafting.fed))
    root = len(session.tokens) - 1
    return Segment.of_tree(
        session.table, root, session.tokens[root], drafting.fed_tree, rows, logit_rows=len(rows)
    )


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
