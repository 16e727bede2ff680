import httpx
import openai
import pytest

from specdec_ray.config import LimitsConfig, SpeculationConfig
from specdec_ray.engine.loop import EngineThread
from specdec_ray.rounds.in_process import InProcessPool
from specdec_ray.serve.openai import build_http_app
from specdec_ray.serve.service import GenerationService, ServedModel

VOCAB, EOS, CONTEXT = 259, 257, 512


@pytest.fixture
def make_service(make_llama, make_target, make_draft, tokenizer, grammars):
    """A service on in-process engines."""

    def make(*, limits=None, max_generations=32, drafts=True, blocks=400):
        target = InProcessPool(EngineThread(make_target(make_llama(), blocks=blocks), "target"))
        draft = None
        if drafts:
            near = make_draft(make_llama(noise=0.05), blocks=blocks)
            draft = InProcessPool(EngineThread(near, "draft"))
        model = ServedModel("tiny", tokenizer, frozenset({EOS}), CONTEXT, VOCAB, grammars)
        speculation = SpeculationConfig(draft_tokens=4)
        return GenerationService(
            model, target, draft, speculation, limits or LimitsConfig(), max_generations
        )

    return make


@pytest.fixture
def service(make_service):
    return make_service()


@pytest.fixture
def http(service):
    """A raw client of the service's application."""
    transport = httpx.ASGITransport(build_http_app(service))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
def client(http):
    """The official client of the same."""
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
    )
