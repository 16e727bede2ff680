"""Packed batches against the stock forward, for every architecture named in the README."""

import random
from copy import deepcopy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from specdec_ray.models.attention import PAGED_ATTENTION
from specdec_ray.models.packed import Segment
from specdec_ray.models.packed_model import PackedModel
from specdec_ray.speculation.tree import ROOT, TokenTree

VOCAB, LENGTH, BLOCK = 120, 48, 4
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **ENDS,
}
CONFIGS = {
    "llama": LlamaConfig(**LLAMA_LIKE),
    "qwen2": Qwen2Config(**LLAMA_LIKE),
    "qwen2-window": Qwen2Config(
        **LLAMA_LIKE, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**LLAMA_LIKE, head_dim=16),
    "mistral": MistralConfig(**LLAMA_LIKE, sliding_window=7),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=128, **ENDS),
    "gpt_neox": GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        **ENDS,
    ),
    "opt": OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        **ENDS,
    ),
}


def build(config):
    return AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager").eval()


def paged_twin(model):
    """The same weights behind our attention."""
    twin = build(model.config)
    twin.load_state_dict(model.state_dict())
    twin.set_attn_implementation(PAGED_ATTENTION)
    return twin


class Case:
    """A stock model and the same weights as a packed model."""

    def __init__(self, config):
        torch.manual_seed(0)
        self.stock = build(config)
        self.packed = PackedModel(paged_twin(self.stock), block_count=100, block_size=BLOCK)
        free = self.packed.pool.allocate(100)
        random.Random(0).shuffle(free)  # neighbours in a sequence are strangers in the cache
        self.packed.pool.release(free)

    @torch.inference_mode()
    def reference(self, ids):
        """Stock logits [len(ids), vocab]."""
        return self.stock(torch.tensor([ids])).logits[0]

    def table(self, length):
        return self.packed.pool.allocate(-(-length // BLOCK))

    def run(self, table, ids, sizes):
        """Feed ids in chunks of the given sizes and return all logits."""
        logits, base = [], 0
        for size in sizes:
            chunk = ids[base : base + size]
            logits.append(self.packed.forward([Segment(table, base, chunk, None, len(chunk))]))
            base += size
        return torch.cat(logits)


@pytest.fixture(params=list(CONFIGS), scope="module")
def case(request):
    return Case(CONFIGS[request.param])


@pytest.fixture
def ids():
    return torch.randint(2, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


def assert_close(got, expected):
    assert (got - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "sizes", [(48,), (20, 20, 8), (1,) * 48, (1, 5, 5, 5, 17, 15)], ids=lambda s: f"{len(s)}parts"
)
def test_chunks_equal_the_stock_forward(case, ids, sizes):
    table = case.table(LENGTH)
    assert_close(case.run(table, ids, sizes), case.reference(ids))
    case.packed.pool.release(table)


@pytest.mark.parametrize("sizes", [(48,), (20, 20, 8), (1,) * 48], ids=lambda s: f"{len(s)}parts")
def test_blocks_in_a_row_are_read_as_they_lie(case, ids, sizes):
    case.packed.pool.release(free := case.packed.pool.allocate(case.packed.pool.free_count))
    first = next(block for block in free if {*range(block, block + 12)} <= {*free})
    table = list(range(first, first + 12))
    assert_close(case.run(table, ids, sizes), case.reference(ids))


def test_a_lone_session_equals_itself_in_company(case, ids):
    """The two plans agree, from the first row on and behind a committed context."""
    tables = [case.table(LENGTH) for _ in range(3)]
    for base, rows in ((0, 20), (20, 1), (21, 6)):
        segments = [Segment(t, base, ids[base : base + rows], None, rows) for t in tables]
        alone = case.packed.forward(segments[:1])
        together = case.packed.forward(segments[1:])
        assert_close(together, alone.repeat(2, 1))
    for table in tables:
        case.packed.pool.release(table)


def test_sessions_of_different_length_share_a_batch(case, ids):
    lengths, new = (3, 9, 40), (2, 5, 1)
    tables = [case.table(LENGTH) for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        case.run(table, ids[::-1], (length,))
    segments = [
        Segment(table, length, ids[::-1][length : length + rows], None, rows)
        for table, length, rows in zip(tables, lengths, new, strict=True)
    ]
    segments.insert(1, Segment(fresh := case.table(LENGTH), 0, ids[:30], None, 1))
    got = case.packed.forward(segments).split([2, 1, 5, 1])
    reversed_reference = case.reference(ids[::-1])
    assert_close(got[0], reversed_reference[3:5])
    assert_close(got[1], case.reference(ids)[29:30])
    assert_close(got[2], reversed_reference[9:14])
    assert_close(got[3], reversed_reference[40:41])
    for table in (*tables, fresh):
        case.packed.pool.release(table)


def test_rollback_is_a_smaller_base(case, ids):
    table = case.table(LENGTH)
    case.run(table, ids[:20] + [5] * 10, (20, 10))
    got = case.packed.forward([Segment(table, 17, ids[17:25], None, 8)])
    assert_close(got, case.reference(ids)[17:25])
    case.packed.pool.release(table)


def random_tree(nodes, seed):
    rng = random.Random(seed)
    parents = [ROOT, *(rng.randrange(ROOT, node) for node in range(1, nodes))]
    return TokenTree(tuple(rng.randrange(2, VOCAB) for _ in parents), tuple(parents))


def path_to(tree, node):
    path = []
    while node != ROOT:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


# Deeper than the windows, and its rows lie further from the root than their positions.
DEEP_TREE = TokenTree(tuple(range(20, 36)), (ROOT, ROOT, ROOT, *range(2, 15)))


@pytest.mark.parametrize("tree", [*(random_tree(16, seed) for seed in range(3)), DEEP_TREE])
def test_each_tree_node_sees_its_own_path_only(case, ids, tree):
    context = ids[:21]
    table = case.table(LENGTH)
    case.run(table, context, (20,))
    rows = (context[-1], *tree.tokens)
    got = case.packed.forward([Segment(table, 20, rows, tree, len(rows))])
    assert_close(got[0], case.reference(context)[-1])
    for node in range(len(tree)):
        path = [tree.tokens[n] for n in path_to(tree, node)]
        assert_close(got[node + 1], case.reference(context + path)[-1])
    case.packed.pool.release(table)


def test_compaction_keeps_the_accepted_path(case, ids):
    context, tree = ids[:21], TokenTree((7, 8, 9, 10), (ROOT, ROOT, 1, 2))
    table = case.table(LENGTH)
    case.run(table, context, (20,))
    case.packed.forward([Segment(table, 20, (context[-1], *tree.tokens), tree, 5)])
    case.packed.compact(table, 20, (0, 2, 3, 4))
    got = case.packed.forward([Segment(table, 24, ids[30:33], None, 3)])
    assert_close(got, case.reference([*context, 8, 9, 10, *ids[30:33]])[-3:])
    got = case.packed.forward([Segment(table, 22, ids[30:33], None, 3)])  # back into the path
    assert_close(got, case.reference([*context, 8, *ids[30:33]])[-3:])
    case.packed.pool.release(table)


def test_prefill_chunk_asks_for_no_logits(case, ids):
    table = case.table(LENGTH)
    got = case.packed.forward([Segment(table, 0, ids[:10], logit_rows=0)])
    assert got.shape == (0, VOCAB)
    case.packed.pool.release(table)


def test_sizes_are_reported(case):
    assert case.packed.capacity_tokens == 400
    assert case.packed.context_length == 128
    assert case.packed.vocab_size == VOCAB
    assert case.packed.kv_bytes_per_token in (512, 1024)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_runs_and_is_near(dtype, ids):
    case = Case(CONFIGS["llama"])
    low = paged_twin(case.stock).to(dtype)
    packed = PackedModel(low, block_count=20, block_size=BLOCK)
    table = packed.pool.allocate(12)
    got = packed.forward([Segment(table, 0, ids, None, LENGTH)])
    assert got.dtype == torch.float32
    assert (got - case.reference(ids)).abs().max() < 0.05
