"""Tiny models, a byte-level tokenizer, and the leak check that no test can forget."""

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_ray.engine.draft import DraftEngine
from specdec_ray.engine.grammar import Grammars
from specdec_ray.engine.loop import EngineThread
from specdec_ray.engine.sessions import ReplicaIdentity
from specdec_ray.engine.target import TargetEngine
from specdec_ray.models.attention import PAGED_ATTENTION
from specdec_ray.models.packed_model import PackedModel
from specdec_ray.speculation.shape import Shape, StaticShape

VOCAB = 259
BOS, EOS, PAD = 256, 257, 258
CONTEXT = 512


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every engine a test starts must end it with no session and no KV block in use."""
    started: list[tuple[EngineThread, int]] = []
    plain_init = EngineThread.__init__

    def recording_init(self: EngineThread, engine: object, name: str) -> None:
        plain_init(self, engine, name)  # type: ignore[arg-type]
        started.append((self, self.load.free_blocks))

    monkeypatch.setattr(EngineThread, "__init__", recording_init)
    yield
    for thread, blocks in started:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and (
            thread.session_count or thread.load.free_blocks != blocks
        ):
            time.sleep(0.005)
        left = (thread.session_count, thread.load.waiting, blocks - thread.load.free_blocks)
        if thread.is_alive():
            thread.stop()
        assert left == (0, 0, 0), f"(sessions, waiting, blocks in use) left behind: {left}"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte, so that every other character is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        chat_template=(
            "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
        ),
    )


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., LlamaForCausalLM]:
    """A random Llama; equal arguments give equal weights."""

    def make(
        seed: int = 0, *, hidden: int = 64, layers: int = 2, vocab: int = VOCAB, noise: float = 0.0
    ) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD if vocab > PAD else None,
            initializer_range=0.15,  # peaked enough that greedy text varies
        )
        model = LlamaForCausalLM(config).eval()
        if noise:
            torch.manual_seed(seed + 1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
        return model

    return make


@pytest.fixture(scope="session")
def grammars(tokenizer: PreTrainedTokenizerFast) -> Grammars:
    return Grammars(tokenizer, VOCAB, [EOS])


@pytest.fixture(scope="session")
def make_target(grammars: Grammars) -> Callable[..., TargetEngine]:
    def make(model: LlamaForCausalLM, *, blocks: int = 200, step_tokens: int = 64) -> TargetEngine:
        packed = _packed(model, blocks)
        return TargetEngine(
            packed,
            IDENTITY,
            vocab_limit=VOCAB,
            step_tokens=step_tokens,
            max_nodes=16,
            scratch_slots=16,
            grammars=grammars,
        )

    return make


@pytest.fixture(scope="session")
def make_draft(grammars: Grammars) -> Callable[..., DraftEngine]:
    def make(
        model: LlamaForCausalLM,
        *,
        blocks: int = 200,
        step_tokens: int = 64,
        shape: Shape = CHAIN,
    ) -> DraftEngine:
        return DraftEngine(
            _packed(model, blocks),
            IDENTITY,
            shape=shape,
            vocab_limit=VOCAB,
            unknown_id=0,
            step_tokens=step_tokens,
            grammars=grammars,
        )

    return make


@pytest.fixture(scope="session")
def greedy_reference() -> Callable[..., list[int]]:
    """What the stock model generates, greedily, past end tokens."""

    @torch.inference_mode()
    def generate(model: LlamaForCausalLM, prompt: Sequence[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        return generated[0, len(prompt) :].tolist()

    return generate


CHAIN = StaticShape.chain(64)
IDENTITY = ReplicaIdentity("test", 1)


def _packed(model: LlamaForCausalLM, blocks: int) -> PackedModel:
    model.set_attn_implementation(PAGED_ATTENTION)
    return PackedModel(model, block_count=blocks, block_size=16)
