import asyncio
import secrets
from contextlib import asynccontextmanager

import pytest

from specdec_ray.engine.loop import EngineThread
from specdec_ray.engine.messages import CacheHandle, Open, Opened, Proposal, Propose
from specdec_ray.errors import EngineLost
from specdec_ray.rounds.generate import generate
from specdec_ray.rounds.in_process import InProcessPool
from specdec_ray.rounds.request import GenerationRequest, RoundSettings
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import StaticShape
from specdec_ray.speculation.tree import TokenTree

CHAIN = StaticShape.chain(64)
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def target_pool(make_llama, make_target):
    return InProcessPool(EngineThread(make_target(make_llama()), "target"))


@pytest.fixture
def draft_pool(make_llama, make_draft):
    """A factory of draft pools by quality."""

    def make(kind, shape=CHAIN):
        models = {"same": {}, "near": {"noise": 0.05}, "other": {"seed": 9}}
        if kind == "none":
            return None
        return InProcessPool(
            EngineThread(make_draft(make_llama(**models[kind]), shape=shape), kind)
        )

    return make


@pytest.fixture
def play():
    """Run one generation to its end; emissions, and the tokens they hold."""

    async def run(prompt, targets, drafts, count, *, k=4, params=GREEDY, rule=Rule.COUPLED):
        request = GenerationRequest(tuple(prompt), params, count, draft_tokens=k, rule=rule)
        settings = RoundSettings(rule, k, draft_timeout_s=5)
        emissions = [e async for e in generate(request, targets, drafts, settings)]
        return emissions, [token for e in emissions for token in e.tokens]

    return run


class ScriptedPool:
    """A draft whose proposals a test writes: `script(committed, count)` gives the tokens, None
    for no answer at all, or an error to raise."""

    def __init__(self, script):
        self.script = script
        self.open_sessions = 0

    @asynccontextmanager
    async def session(self):
        self.open_sessions += 1
        try:
            yield ScriptedSession(self.script)
        finally:
            self.open_sessions -= 1


class ScriptedSession:
    def __init__(self, script):
        self.session_id = secrets.token_bytes(16)
        self._script = script
        self._tokens = []

    def call(self, request):
        return asyncio.ensure_future(self._answer(request))

    async def _answer(self, request):
        if isinstance(request, Open):
            self._tokens = list(request.tokens)
            return Opened(self._handle(), ())
        assert isinstance(request, Propose)
        self._tokens = self._tokens[: request.handle.length] + list(request.tokens)
        drafted = self._script(self._tokens, request.budget.depth)
        if isinstance(drafted, Exception):
            raise drafted
        if hasattr(drafted, "__await__"):
            await drafted
        return Proposal(self._handle(), len(self._tokens), TokenTree.chain(drafted))

    def _handle(self):
        return CacheHandle(self.session_id, "scripted", 1, 0, len(self._tokens))


@pytest.fixture
def scripted():
    return ScriptedPool


@pytest.fixture
def flaky():
    """A pool whose sessions lose their engine after some calls."""

    class FlakyPool:
        def __init__(self, pool, calls_before_loss):
            self._pool, self._calls = pool, calls_before_loss
            self.sessions = 0

        @asynccontextmanager
        async def session(self):
            self.sessions += 1
            left = self._calls

            class Session:
                session_id = b""

                def call(self, request):
                    nonlocal left
                    if left == 0:
                        raise EngineLost("gone")
                    left -= 1
                    return inner.call(request)

            async with self._pool.session() as inner:
                wrapped = Session()
                wrapped.session_id = inner.session_id
                yield wrapped

    return FlakyPool
