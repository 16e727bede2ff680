import secrets

import pytest

from specdec_ray.engine.messages import Open, Propose, Verify
from specdec_ray.engine.outbox import Outbox
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import Budget
from specdec_ray.speculation.tree import TokenTree

GREEDY = SamplingParams(temperature=0)


class Driver:
    """Drives an engine by hand: no thread, one step at a time."""

    def __init__(self, engine):
        self.engine = engine
        self.steps = 0
        self._outbox = Outbox()
        self.replies = []

    def lease(self):
        session_id = secrets.token_bytes(16)
        self.engine.sessions.lease(session_id)
        return session_id

    def submit(self, request):
        """Hand a request in; its reply appears in `replies`."""
        self.engine.accept(request, self.replies.extend, self._outbox)
        self._outbox.flush()

    def step(self):
        worked = self.engine.step(self._outbox)
        self._outbox.flush()
        self.steps += worked
        return worked

    def ask(self, request):
        """Submit and step until nothing is left to do; the last reply."""
        self.submit(request)
        while self.step():
            pass
        return self.replies[-1]

    def open(self, tokens, *, params=GREEDY, rule=Rule.COUPLED, room=64, session_id=None):
        session_id = session_id or self.lease()
        return self.ask(Open(session_id, tuple(tokens), params, rule, len(tokens) + room))

    def verify(self, handle, round_number, base_length, tokens=(), probs=None):
        tree = tokens if isinstance(tokens, TokenTree) else TokenTree.chain(tokens)
        return self.ask(Verify(handle, round_number, base_length, tree, probs))

    def propose(self, handle, tokens, count):
        return self.ask(Propose(handle, tuple(tokens), Budget(count, count)))


@pytest.fixture
def drive():
    return Driver
