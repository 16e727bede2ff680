"""The target engine: owns the truth. One packed forward verifies many sessions' trees."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from specdec_ray.engine.grammar import Grammars
from specdec_ray.engine.messages import (
    Close,
    Open,
    Opened,
    RefusalCode,
    Refused,
    Request,
    Verdict,
    Verify,
)
from specdec_ray.engine.outbox import Outbox, ReplySink
from specdec_ray.engine.proposer import Proposer
from specdec_ray.engine.sessions import Phase, ReplicaIdentity, Session, SessionTable, ends_context
from specdec_ray.engine.validation import check_draft_probs, check_open, check_tokens, refuse
from specdec_ray.errors import InvalidParameter
from specdec_ray.models.packed import Segment
from specdec_ray.models.packed_model import PackedModel
from specdec_ray.speculation.acceptance import Judgement
from specdec_ray.speculation.logprobs import TokenLogprobs, emitted_logprobs, token_logprobs
from specdec_ray.speculation.shape import Budget
from specdec_ray.speculation.step import RowGroup, judge
from specdec_ray.speculation.tree import TokenTree

MIN_PREFILL_ROWS = 32


class TargetEngine:
    """Sessions on the target model; see `Steppable` for who calls what.

    A step takes every pending verify, then prefill chunks up to `step_tokens` rows.

    Args:
        vocab_limit: number of real token ids; padded embedding rows beyond are never emitted.
        max_nodes: most nodes of one tree.
        scratch_slots: see `SessionTable`; without them trees that are no chains may not fit.
        proposer: what drafts where a verify asks the target for its own tree.
    """

    def __init__(
        self,
        model: PackedModel,
        identity: ReplicaIdentity,
        *,
        vocab_limit: int,
        step_tokens: int,
        max_nodes: int,
        scratch_slots: int = 0,
        grammars: Grammars | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self._model = model
        self.sessions = SessionTable(model, identity, grammars, scratch_slots=scratch_slots)
        self._vocab_limit = vocab_limit
        self._step_tokens = step_tokens
        self._max_nodes = max_nodes
        self._proposer = proposer
        self._verifies: dict[Session, Verify] = {}
        self._verdicts: dict[Session, Verdict] = {}

    def release(self, session_id: bytes) -> None:
        session = self.sessions.get(session_id)
        if session is not None:
            self._forget(session)
            self.sessions.release(session_id)

    def accept(self, request: Request, sink: ReplySink, outbox: Outbox) -> None:
        if isinstance(request, Close):
            self.release(request.session_id)
            return
        refused = self._take(request, sink, outbox)
        if refused is not None:
            outbox.put(sink, refused)

    def step(self, outbox: Outbox) -> bool:
        self.sessions.admit()
        verifies = self._drafted(self._verifies)
        rows = sum(1 + len(verify.tree) for verify in verifies.values())
        budget = max(self._step_tokens - rows, MIN_PREFILL_ROWS)
        chunks = self.sessions.prefill_chunks(budget, logit_rows=1)
        if not verifies and not chunks:
            return False
        work = [(session, _verify_segment(session, verify)) for session, verify in verifies.items()]
        logits = self._forward(work + chunks)

        finishing = [
            session for session, segment in chunks if ends_context(session, segment.tokens)
        ]
        judged = self._score_prompts(logits, rows, chunks)
        if len(judged) < len(logits):
            logits = logits[judged]
        groups = [_row_group(session, verify) for session, verify in verifies.items()]
        groups += [_row_group(session, None) for session in finishing]
        judgements = judge(logits, groups, vocab_limit=self._vocab_limit)
        logprobs = emitted_logprobs(logits, groups, judgements, vocab_limit=self._vocab_limit)

        self._note_choices([*verifies, *finishing], groups, judgements, judged)
        for session, segment in chunks:
            session.kv_length += len(segment.tokens)
        self._verifies = {}
        verdicts = list(zip(judgements, logprobs, strict=True))
        for (session, verify), verdict in zip(verifies.items(), verdicts, strict=False):
            self._conclude(session, verify, *verdict, outbox)
        for session, verdict in zip(finishing, verdicts[len(verifies) :], strict=True):
            self._opened(session, *verdict, outbox)
        return True

    def _drafted(self, verifies: dict[Session, Verify]) -> dict[Session, Verify]:
        """The verifies with trees of the target's own where they ask for those."""
        asked = [(session, verify.own) for session, verify in verifies.items() if verify.own]
        if not asked:
            return verifies
        assert self._proposer is not None, "checked when the verify was taken"
        drafted = dict(verifies)
        proposed = self._proposer.propose(asked)
        for (session, _), (tree, probs) in zip(asked, proposed, strict=True):
            drafted[session] = replace(verifies[session], tree=tree, draft_probs=probs)
        return drafted

    def _forward(self, work: Sequence[tuple[Session, Segment]]) -> torch.Tensor:
        if self._proposer is not None:
            return self._proposer.forward(work)
        return self._model.forward([segment for _, segment in work])

    def _note_choices(
        self,
        sessions: Sequence[Session],
        groups: Sequence[RowGroup],
        judgements: Sequence[Judgement],
        judged: Sequence[int],
    ) -> None:
        """Tell the proposer which row each session's last token was chosen by."""
        if self._proposer is None:
            return
        starts = accumulate(map(len, groups), initial=0)
        rows = [
            judged[start + (judgement.path[-1] + 1 if judgement.path else 0)]
            for start, judgement in zip(starts, judgements, strict=False)
        ]
        self._proposer.chose(sessions, rows)

    def _score_prompts(
        self, logits: torch.Tensor, first: int, chunks: Sequence[tuple[Session, Segment]]
    ) -> list[int]:
        """Note the log-probabilities of prompts that ask for them; the rows that are judged.

        Args:
            first: row of the first chunk's logits; those before are of verifies.
        """
        judged = list(range(first))
        for session, segment in chunks:
            if segment.logit_rows and ends_context(session, segment.tokens):
                judged.append(first + segment.logit_rows - 1)
            if session.scores_prompt:
                # A row's logits are about the token after it.
                after = session.kv_length + 1
                tokens = session.tokens[after : after + len(segment.tokens)]
                tokens = tokens[: max(session.prompt_length - after, 0)]
                scored = logits[first : first + len(tokens), : self._vocab_limit]
                count = session.params.prompt_logprobs or 0
                session.prompt_logprobs += token_logprobs(scored, tokens, count)
            first += segment.logit_rows
        return judged

    def fail_pending(self, outbox: Outbox, error: Exception) -> None:
        self._verifies = {}
        for session in self.sessions.fail_active(outbox, error):
            self._forget(session)

    def _take(self, request: Request, sink: ReplySink, outbox: Outbox) -> Refused | None:
        """Queue the request, or say why not."""
        if isinstance(request, Open):
            return self._take_open(request, sink)
        if isinstance(request, Verify):
            return self._take_verify(request, sink, outbox)
        assert not isinstance(request, Close)
        return refuse(request.handle.session_id, RefusalCode.INVALID, "a target does not propose")

    def _take_open(self, request: Open, sink: ReplySink) -> Refused | None:
        session = self.sessions.get(request.session_id)
        refused = check_open(session, request, self.sessions.context_length, self._vocab_limit)
        if refused is None:
            assert session is not None
            self._forget(session)
            try:
                self.sessions.open(session, request, sink)
            except InvalidParameter as error:
                return refuse(request.session_id, RefusalCode.INVALID, str(error))
        return refused

    def _take_verify(self, request: Verify, sink: ReplySink, outbox: Outbox) -> Refused | None:
        handle = request.handle
        session = self.sessions.get(handle.session_id)
        if session is None or session.phase is Phase.LEASED:
            return refuse(handle.session_id, RefusalCode.UNKNOWN_SESSION, "no such session here")
        verdict = self._verdicts.get(session)
        if verdict is not None and verdict.round == request.round and session.sink is None:
            outbox.put(sink, verdict)  # the reply was lost on the way; never a second draw
            return None
        refused = self._check_verify(session, request)
        if refused is None:
            session.sink = sink
            self._verifies[session] = request
        return refused

    def _check_verify(self, session: Session, request: Verify) -> Refused | None:
        known = len(session.tokens)
        verdict = self._verdicts.get(session)
        next_round = 1 if verdict is None else verdict.round + 1
        if session.sink is not None:
            code, message = RefusalCode.BUSY, "a request of this session is under way"
        elif request.handle.epoch != 0:
            code, message = RefusalCode.STALE_EPOCH, f"epoch is 0, not {request.handle.epoch}"
        elif request.round != next_round:
            code, message = RefusalCode.STALE_ROUND, f"next round is {next_round}"
        elif request.base_length != known:
            code, message = RefusalCode.STALE_LENGTH, f"{known} tokens are committed"
        elif fault := self._fault(session, request):
            code, message = RefusalCode.INVALID, fault
        else:
            return None
        return refuse(session.session_id, code, message, known)

    def _fault(self, session: Session, request: Verify) -> str | None:
        tree = request.tree
        if request.own is not None:
            return self._own_fault(session, request, request.own)
        if len(tree) > self._max_nodes:
            return f"tree has {len(tree)} nodes, limit is {self._max_nodes}"
        known, deepest = len(session.tokens), max(tree.depths, default=0)
        if known + deepest > session.max_length:
            return f"{known} tokens and {deepest} drafted ones exceed {session.max_length}"
        if known + len(tree) > self.sessions.slots(session):
            return f"{len(tree)} nodes behind {known} tokens do not fit the session's KV cache"
        try:
            RowGroup(session.params, session.rule, 0, tree).check_tree()
        except InvalidParameter as error:
            return str(error)
        fault = check_tokens(tree.tokens, self._vocab_limit)
        if fault or request.draft_probs is None or not session.rule.needs_draft_probs:
            return fault
        return check_draft_probs(request.draft_probs, tree, self._vocab_limit)

    def _own_fault(self, session: Session, request: Verify, own: Budget) -> str | None:
        known = len(session.tokens)
        if self._proposer is None:
            return "this target does not draft by itself"
        if len(request.tree):
            return "a tree is sent and the target's own is asked for"
        if min(own.nodes, own.depth) < 1 or known + own.depth > session.max_length:
            return f"{known} tokens and {own.depth} drafted ones exceed {session.max_length}"
        return None

    def _conclude(
        self,
        session: Session,
        verify: Verify,
        judgement: Judgement,
        logprobs: tuple[TokenLogprobs, ...],
        outbox: Outbox,
    ) -> None:
        rows = (0, *(node + 1 for node in judgement.path))
        self._model.compact(session.table, session.kv_length, rows)
        session.kv_length += len(rows)
        session.tokens.extend(judgement.emitted)
        verdict = Verdict(
            self.sessions.handle(session, session.kv_length),
            verify.round,
            proposed=len(verify.tree),
            accepted=len(judgement.path),
            emitted=judgement.emitted,
            load=self.sessions.load,
            logprobs=logprobs,
        )
        self._verdicts[session] = verdict
        outbox.put(session.finish(), verdict)

    def _opened(
        self,
        session: Session,
        judgement: Judgement,
        logprobs: tuple[TokenLogprobs, ...],
        outbox: Outbox,
    ) -> None:
        session.phase = Phase.READY
        session.tokens.extend(judgement.emitted)
        handle = self.sessions.handle(session, session.kv_length)
        opened = Opened(handle, judgement.emitted, logprobs, tuple(session.prompt_logprobs))
        outbox.put(session.finish(), opened)

    def _forget(self, session: Session) -> None:
        self._verifies.pop(session, None)
        self._verdicts.pop(session, None)
        if self._proposer is not None:
            self._proposer.forget(session)


def _verify_segment(session: Session, verify: Verify) -> Segment:
    rows = range(1 + len(verify.tree))
    root = session.tokens[-1]
    return Segment.of_tree(session.table, session.kv_length, root, verify.tree, rows, len(rows))


def _row_group(session: Session, verify: Verify | None) -> RowGroup:
    tree = verify.tree if verify else TokenTree()
    return RowGroup(
        params=session.params,
        rule=session.rule,
        position=len(session.tokens),
        tree=tree,
        draft_probs=verify.draft_probs if verify else None,
        context=session.tokens,
        prompt_length=session.prompt_length,
        allowed=session.allowed(((), *tree.paths)),
    )
