"""A draft with another tokenizer than the target's, behind the interface of one that shares it."""

from dataclasses import dataclass, replace
from math import ceil

from specdec_ray.engine.draft import DraftEngine
from specdec_ray.engine.messages import (
    Close,
    Open,
    Opened,
    Proposal,
    Propose,
    RefusalCode,
    Reply,
    Request,
    Verify,
)
from specdec_ray.engine.outbox import Outbox, ReplySink
from specdec_ray.engine.sessions import Phase
from specdec_ray.engine.validation import refuse
from specdec_ray.models.translation import TokenizerPair, Translation
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import Budget
from specdec_ray.speculation.tree import TokenTree

ROOM_MARGIN = 1.5  # a text may need more draft tokens than the pair's ratio says
GREEDY = SamplingParams(temperature=0)


@dataclass(slots=True)
class Bridged:
    """A session in the target's tokens.

    Attributes:
        count: tokens that the proposal under way may have.
    """

    translation: Translation
    count: int = 0


class BridgedDraft:
    """A Steppable that translates the target's tokens on their way to a draft, and its own back.

    The draft goes on greedily, whatever the request's parameters, which speak of the target's ids:
    a proposal without randomness, so that every acceptance rule is exact without its q.
    """

    def __init__(self, draft: DraftEngine, pair: TokenizerPair) -> None:
        self.sessions = draft.sessions
        self._draft = draft
        self._pair = pair
        self._bridged: dict[bytes, Bridged] = {}
        self._replies = Outbox()

    def release(self, session_id: bytes) -> None:
        self._bridged.pop(session_id, None)
        self._draft.release(session_id)

    def accept(self, request: Request, sink: ReplySink, outbox: Outbox) -> None:
        if isinstance(request, Close):
            self.release(request.session_id)
        elif isinstance(request, Open):
            self._draft.accept(self._opening(request), sink, self._replies)
        elif isinstance(request, Verify):
            self._draft.accept(request, sink, self._replies)
        else:
            self._propose(request, sink)
        self._deliver(outbox)

    def step(self, outbox: Outbox) -> bool:
        worked = self._draft.step(self._replies)
        self._deliver(outbox)
        return worked

    def fail_pending(self, outbox: Outbox, error: Exception) -> None:
        self._draft.fail_pending(outbox, error)

    def _opening(self, request: Open) -> Open:
        session = self.sessions.get(request.session_id)
        if session is None or session.sink is not None:
            return request  # about to be refused
        translation = Translation(self._pair, request.tokens)
        self._bridged[request.session_id] = Bridged(translation)
        _, ids = translation.unsent()
        room = (request.max_length - len(request.tokens)) * self._pair.ratio * ROOM_MARGIN
        return Open(request.session_id, ids, GREEDY, Rule.COUPLED, max_length=len(ids) + ceil(room))

    def _propose(self, request: Propose, sink: ReplySink) -> None:
        session = self.sessions.get(request.handle.session_id)
        if session is None or session.phase is not Phase.READY or session.sink is not None:
            self._draft.accept(request, sink, self._replies)  # refused
            return
        bridged = self._bridged[session.session_id]
        translation, known = bridged.translation, len(bridged.translation.tokens)
        if request.handle.length > known:
            message = f"{known} tokens are known here"
            self._replies.put(
                sink, refuse(session.session_id, RefusalCode.STALE_LENGTH, message, known)
            )
            return
        translation.extend(request.tokens[known - request.handle.length :])
        bridged.count = min(request.budget.nodes, request.budget.depth)
        room = session.max_length - len(translation)
        count = min(max(1, round(bridged.count * self._pair.ratio)), room)
        handle = self.sessions.handle(session, len(translation))
        if not translation.complete or count < 1:
            self._replies.put(sink, Proposal(handle, len(translation), TokenTree()))
            return
        start, ids = translation.unsent()
        self._draft.accept(
            Propose(replace(request.handle, length=start), ids, Budget(count, count)),
            sink,
            self._replies,
        )

    def _deliver(self, outbox: Outbox) -> None:
        for sink, replies in self._replies.drain().items():
            for reply in replies:
                outbox.put(sink, self._translated(reply))

    def _translated(self, reply: Reply) -> Reply:
        """An engine's reply as the target's tokens have it."""
        if isinstance(reply, Opened):
            tokens = self._bridged[reply.handle.session_id].translation.tokens
            return replace(reply, handle=replace(reply.handle, length=len(tokens)))
        if isinstance(reply, Proposal):
            bridged = self._bridged[reply.handle.session_id]
            length = len(bridged.translation.tokens)
            drafted = bridged.translation.back(reply.tree.tokens)[: bridged.count]
            return Proposal(replace(reply.handle, length=length), length, TokenTree.chain(drafted))
        return reply
