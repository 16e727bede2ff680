"""What drafts inside the target's own step: its model, Medusa heads, or its first layers."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Protocol

import torch

from specdec_ray.engine.growing import draw_rows, start_growth
from specdec_ray.engine.sessions import Session
from specdec_ray.models.medusa import MedusaHeads
from specdec_ray.models.packed import Segment
from specdec_ray.models.packed_model import PackedModel
from specdec_ray.models.split import SplitModel
from specdec_ray.speculation.proposal import DraftProbs
from specdec_ray.speculation.shape import Budget, Growth, Shape, StaticShape
from specdec_ray.speculation.step import draw
from specdec_ray.speculation.tree import TokenTree

Proposed = tuple[TokenTree, DraftProbs | None]
Work = Sequence[tuple[Session, Segment]]


class Proposer(Protocol):
    """Called once per target step, in this order."""

    def propose(self, asked: Sequence[tuple[Session, Budget]]) -> list[Proposed]:
        """A tree for each session, on top of its last committed token."""
        ...

    def forward(self, work: Work) -> torch.Tensor:
        """Logits of the rows that ask for them, as `PackedModel.forward`."""
        ...

    def chose(self, sessions: Sequence[Session], rows: Sequence[int]) -> None:
        """Which row of those logits each session's newest token was chosen by."""
        ...

    def forget(self, session: Session) -> None: ...


class MedusaProposer:
    """Heads on the state that chose a session's last token, which is kept between steps."""

    def __init__(
        self, model: PackedModel, heads: MedusaHeads, shape: Shape, vocab_limit: int
    ) -> None:
        self._model, self._heads, self._shape = model, heads, shape
        self._vocab_limit = vocab_limit
        self._states = torch.empty(0)
        self._last: dict[Session, torch.Tensor] = {}
        head = model.model.get_output_embeddings()
        head.register_forward_pre_hook(self._note)

    def propose(self, asked: Sequence[tuple[Session, Budget]]) -> list[Proposed]:
        depth = len(self._heads)
        growths = [
            start_growth(session, self._shape, replace(budget, depth=min(budget.depth, depth)))
            for session, budget in asked
        ]
        states = torch.stack([self._last[session] for session, _ in asked])
        for head in self._heads:
            growing = [at for at, growth in enumerate(growths) if growth.sprouts]
            if not growing:
                break
            logits = head(states).float()
            _grow(
                logits[[at for at in growing for _ in growths[at].sprouts]],
                [(asked[at][0], growths[at]) for at in growing],
                self._vocab_limit,
            )
        return [growth.proposal() for growth in growths]

    def forward(self, work: Work) -> torch.Tensor:
        return self._model.forward([segment for _, segment in work])

    def chose(self, sessions: Sequence[Session], rows: Sequence[int]) -> None:
        if sessions:
            self._last.update(zip(sessions, self._states[list(rows)].unbind(), strict=True))

    def forget(self, session: Session) -> None:
        self._last.pop(session, None)

    def _note(self, _: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        self._states = inputs[0][0]


class EarlyExitProposer:
    """The target's first layers, whose KV and states the verification goes on from.

    Nodes are fed level by level into the slots that the verified tree gives them, which static
    shapes allow. Within a step every row passes the first layers once.
    """

    def __init__(self, model: SplitModel, shape: StaticShape, vocab_limit: int) -> None:
        self._model, self._shape, self._vocab_limit = model, shape, vocab_limit
        self._states: list[torch.Tensor] = []
        self._fed: dict[Session, dict[int, int]] = {}  # row of a tree: place among all states
        self._count = 0

    def propose(self, asked: Sequence[tuple[Session, Budget]]) -> list[Proposed]:
        self._start()
        growths = [start_growth(session, self._shape, budget) for session, budget in asked]
        while growing := [
            (session, growth)
            for (session, _), growth in zip(asked, growths, strict=True)
            if growth.sprouts
        ]:
            logits = self._feed(
                [(session, _sprout_rows(session, growth)) for session, growth in growing]
            )
            _grow(logits, growing, self._vocab_limit)
        return [growth.proposal() for growth in growths]

    def forward(self, work: Work) -> torch.Tensor:
        rest = []
        for session, segment in work:
            fed = self._fed.get(session, {})
            rows = [row for row in range(len(segment.tokens)) if row not in fed]
            if rows:
                rest.append((session, _part(segment, rows)))
        if rest:
            self._feed(rest)
        places = [
            self._fed[session][row]
            for session, segment in work
            for row in range(len(segment.tokens))
        ]
        states = torch.cat(self._states)[places]
        self._start()
        return self._model.upper([segment for _, segment in work], states)

    def chose(self, sessions: Sequence[Session], rows: Sequence[int]) -> None:
        pass

    def forget(self, session: Session) -> None:
        pass

    def _start(self) -> None:
        self._states, self._fed, self._count = [], {}, 0

    def _feed(self, parts: Sequence[tuple[Session, tuple[Segment, Sequence[int]]]]) -> torch.Tensor:
        logits, states = self._model.lower([segment for _, (segment, _) in parts])
        self._states.append(states)
        for session, (_, rows) in parts:
            fed = self._fed.setdefault(session, {})
            for row in rows:
                fed[row] = self._count
                self._count += 1
        return logits


def _grow(
    logits: torch.Tensor, growing: Sequence[tuple[Session, Growth]], vocab_limit: int
) -> None:
    """Give each growth its next level from a row of logits per sprout."""
    rows = [draw_rows(session, growth) for session, growth in growing]
    drawn = iter(draw(logits, list(chain(*rows)), vocab_limit=vocab_limit))
    for (_, growth), own in zip(growing, rows, strict=True):
        growth.extend(list(islice(drawn, len(own))))


def _sprout_rows(session: Session, growth: Growth) -> tuple[Segment, Sequence[int]]:
    """The nodes that get children next, as rows of the tree so far."""
    rows = [sprout.node + 1 for sprout in growth.sprouts]
    tree = TokenTree(tuple(growth.tokens), tuple(growth.parents))
    root = session.tokens[-1]
    segment = Segment.of_tree(session.table, session.kv_length, root, tree, rows, len(rows))
    return segment, rows


def _part(segment: Segment, rows: Sequence[int]) -> tuple[Segment, Sequence[int]]:
    """Some rows of a segment, without logits."""
    tokens = [segment.tokens[row] for row in rows]
    if segment.tree is not None:
        return replace(segment, tokens=tokens, rows=rows, logit_rows=0), rows
    # Those of a chain are its last ones.
    return replace(segment, base=segment.base + rows[0], tokens=tokens, logit_rows=0), rows
