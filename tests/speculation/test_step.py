import pytest
import torch

from specdec_ray.errors import InvalidParameter
from specdec_ray.sampling.logits import NUCLEUS_CANDIDATES
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation import batches, step
from specdec_ray.speculation.proposal import DraftProbs, Rule
from specdec_ray.speculation.step import DRAFT_SUPPORT, DrawRow, RowGroup, draw, judge
from specdec_ray.speculation.tree import ROOT, TokenTree

V = 3000


def groups():
    """One of everything: rules, filters, lengths, no tree at all, a branching tree."""
    ids = torch.arange(8).expand(3, 8)
    q = DraftProbs(ids, torch.full((3, 8), 1 / 8))
    narrow = DraftProbs(torch.tensor([[1], [2], [3]]), torch.ones(3, 1))
    chain = TokenTree.chain((1, 2, 3))
    branching = TokenTree((1, 2, 3), (ROOT, ROOT, 1))
    return [
        RowGroup(SamplingParams(temperature=0), Rule.COUPLED, 5, TokenTree.chain((4, 4))),
        RowGroup(SamplingParams(seed=1), Rule.COUPLED, 9),
        RowGroup(SamplingParams(seed=2, top_k=5), Rule.COUPLED, 9, chain),
        RowGroup(SamplingParams(seed=6, top_k=500), Rule.COUPLED, 9, chain),
        RowGroup(SamplingParams(seed=7, top_k=2000), Rule.COUPLED, 9, chain),
        RowGroup(SamplingParams(seed=3, top_p=0.7), Rule.REJECTION, 2, chain, q),
        RowGroup(SamplingParams(seed=3, top_k=9), Rule.REJECTION, 2, chain, narrow),
        RowGroup(SamplingParams(seed=9), Rule.REJECTION, 2, chain),
        RowGroup(SamplingParams(seed=4), Rule.REJECTION, 7),
        RowGroup(SamplingParams(seed=4), Rule.REJECTION, 7, branching, q),
        RowGroup(SamplingParams(seed=4, top_k=9), Rule.REJECTION, 7, branching),
        RowGroup(SamplingParams(seed=3), Rule.BLOCK, 2, chain, q),
        RowGroup(SamplingParams(seed=3), Rule.BLOCK, 2, TokenTree.chain((2,))),
        RowGroup(SamplingParams(seed=3, top_p=0.7), Rule.BLOCK, 2, chain, narrow),
        RowGroup(SamplingParams(temperature=0), Rule.BLOCK, 7, branching),
        RowGroup(SamplingParams(seed=3), Rule.TYPICAL, 2, branching),
        RowGroup(SamplingParams(temperature=0), Rule.REJECTION, 7, chain),
        RowGroup(SamplingParams(temperature=0), Rule.REJECTION, 7, branching),
        RowGroup(SamplingParams(seed=5), Rule.COUPLED, 1, branching),
        RowGroup(SamplingParams(seed=8, top_p=0.999, temperature=9.0), Rule.COUPLED, 1, branching),
        RowGroup(SamplingParams(seed=8, min_p=0.01, choice=2), Rule.REJECTION, 1, chain, q),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_batch_equals_each_session_alone(dtype):
    """Also on logits with the ties of bfloat16, which no order may break differently."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        all_groups = groups()
        logits = [
            (3 * torch.randn(len(g), V, generator=generator)).to(dtype).float() for g in all_groups
        ]
        together = judge(torch.cat(logits), all_groups, V)
        alone = [judge(own, [g], V)[0] for own, g in zip(logits, all_groups, strict=True)]
        assert together == alone


def test_batches_cut_to_a_smaller_size_decide_the_same(monkeypatch):
    all_groups = groups() * 3
    logits = torch.randn(sum(map(len, all_groups)), V)
    whole = judge(logits, all_groups, V)
    monkeypatch.setattr(batches, "_CPU_BATCH", 5 * V)
    assert judge(logits, all_groups, V) == whole
    sampling = [
        b for b in batches.batches(all_groups, logits, lambda _: None) if b.rule is not None
    ]
    assert max(len(b.rows) for b in sampling) == 5
    assert sum(len(b.rows) for b in sampling) == sum(
        len(g) for g in all_groups if not g.params.greedy
    )


def test_a_nucleus_wider_than_its_candidates_is_decided_on_every_id():
    """Flat rows, whose top-p keeps more ids than are looked at first, next to peaked ones."""
    wide = RowGroup(SamplingParams(seed=1, top_p=0.95), Rule.COUPLED, 0)
    flat = torch.zeros(400, V)
    many = [RowGroup(SamplingParams(seed=s, top_p=0.95), Rule.COUPLED, 0) for s in range(400)]
    tokens = {j.emitted[0] for j in judge(flat, many, V)}
    assert len(tokens) > 300  # not only the first thousand ids, nor one
    assert max(tokens) > 2000
    peaked = flat[:1].clone()
    peaked[0, 17] = 50.0
    judged = judge(torch.cat((flat[:1], peaked)), [wide, wide], V)
    assert judged == [judge(flat[:1], [wide], V)[0], judge(peaked, [wide], V)[0]]


@pytest.mark.parametrize("rule", list(Rule))
def test_every_number_of_candidates_decides_alike(monkeypatch, rule):
    """A nucleus of about 1,500 ids: found among the wide candidates, or only among all."""
    logits = (-0.002 * torch.arange(float(V))).expand(200, V)
    own = [RowGroup(SamplingParams(seed=s, top_p=0.95), rule, 0) for s in range(200)]
    tokens = [j.emitted for j in judge(logits, own, V)]
    assert max(tokens) > (NUCLEUS_CANDIDATES,)
    monkeypatch.setattr(step, "WIDE_CANDIDATES", NUCLEUS_CANDIDATES)
    assert [j.emitted for j in judge(logits, own, V)] == tokens
    monkeypatch.setattr(step, "WIDE_CANDIDATES", 2000)
    assert [j.emitted for j in judge(logits, own, V)] == tokens


def test_one_copy_to_the_host_ends_a_step(monkeypatch):
    """Every other way to the host would make a GPU wait in the middle of a step."""
    copies = []
    for name in ("cpu", "tolist"):
        plain = getattr(torch.Tensor, name)

        def counting(tensor, name=name, plain=plain):
            copies.append(name)
            return plain(tensor)

        monkeypatch.setattr(torch.Tensor, name, counting)
    for name in ("__bool__", "item", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(name))
    logits = -0.01 * torch.arange(V).float().expand(sum(map(len, groups())), V)
    narrow = [g for g in groups() if g.params.temperature < 9]
    judge(logits[: sum(map(len, narrow))], narrow, V)
    assert copies == ["tolist"]
    rows = [DrawRow(g.params, g.rule, g.position) for g in groups()]
    copies.clear()
    draw(logits[: len(rows)], rows, V)
    assert copies[0] == "cpu"  # what follows reads the copy
    assert copies.count("cpu") == 1


def test_padding_of_the_embedding_is_never_emitted():
    logits = torch.zeros(200, V)
    logits[:, V - 50 :] = 10.0
    batch = [RowGroup(SamplingParams(seed=s, temperature=5), Rule.COUPLED, 0) for s in range(150)]
    batch += [RowGroup(SamplingParams(seed=s, top_k=3), Rule.REJECTION, 0) for s in range(49)]
    batch.append(RowGroup(SamplingParams(temperature=0), Rule.COUPLED, 0))
    assert max(j.emitted[0] for j in judge(logits, batch, vocab_limit=V - 50)) < V - 50
    rows = [DrawRow(g.params, g.rule, g.position) for g in batch]
    for drawn in draw(logits, rows, vocab_limit=V - 50):
        assert drawn.tokens[0] < V - 50
        assert drawn.probs is None or int(drawn.probs.ids.max()) < V - 50


def test_a_seed_names_the_draw_whatever_ran_before_or_beside_it():
    """Seeded rows among others, and after other requests, equal the rows alone."""
    logits = torch.randn(4, V)
    params = [SamplingParams(seed=s, top_k=k) for s, k in [(42, 0), (7, 5), (42, 5), (9, 0)]]
    together = judge(logits, [RowGroup(p, Rule.COUPLED, 3) for p in params], V)
    for _ in range(3):
        judge(
            torch.randn(17, V),
            [RowGroup(SamplingParams(seed=s), Rule.COUPLED, 3) for s in range(17)],
            V,
        )
    for row, own in enumerate(params):
        assert judge(logits[row : row + 1], [RowGroup(own, Rule.COUPLED, 3)], V) == [together[row]]


def test_choices_of_one_seed_differ_and_repeat():
    """The texts that three choices of one request begin with, eight tokens each."""
    own = [
        RowGroup(SamplingParams(seed=7, choice=choice), Rule.COUPLED, position)
        for choice in range(3)
        for position in range(8)
    ]
    tokens = [j.emitted[0] for j in judge(torch.zeros(24, 50), own, 50)]
    assert len({tuple(tokens[at : at + 8]) for at in (0, 8, 16)}) == 3
    assert tokens == [j.emitted[0] for j in judge(torch.zeros(24, 50), own, 50)]


def test_positions_follow_depth():
    """A node's row draws as a round's root row would at that position."""
    logits = torch.randn(1, V)
    own = SamplingParams(seed=3)
    at = [judge(logits, [RowGroup(own, Rule.COUPLED, 20 + d)], V)[0].emitted[0] for d in range(3)]
    first, second = at[0], at[1]
    tree = TokenTree((9, first, second), (ROOT, ROOT, 1))
    (judgement,) = judge(logits.expand(4, V), [RowGroup(own, Rule.COUPLED, 20, tree)], V)
    assert judgement.emitted == tuple(at)


def test_coupled_and_greedy_drafts_ship_no_q():
    rows = [DrawRow(SamplingParams(), Rule.COUPLED, 0)]
    rows.append(DrawRow(SamplingParams(temperature=0), Rule.REJECTION, 0))
    assert [drawn.probs for drawn in draw(torch.randn(2, V), rows, V)] == [None, None]


def test_filters_of_a_draft_act_within_its_support():
    """Half of the mass of 64 ids, not of the vocabulary, of which they hold a quarter."""
    row = DrawRow(SamplingParams(top_p=0.5), Rule.REJECTION, 0)
    (drawn,) = draw(-0.005 * torch.arange(float(V))[None], [row], V)
    assert 25 < int((drawn.probs.probs > 0).sum()) < 35


def test_the_rules_draw_with_noise_of_their_own():
    logits = torch.zeros(400, 50)
    tokens = [
        [
            drawn.tokens
            for drawn in draw(
                logits, [DrawRow(SamplingParams(seed=s), rule, 0) for s in range(400)], 50
            )
        ]
        for rule in (Rule.COUPLED, Rule.REJECTION)
    ]
    assert sum(a == b for a, b in zip(*tokens, strict=True)) < 30  # one in fifty by chance


def test_shipped_width_does_not_depend_on_the_batch():
    """Steps of one chain run beside different sessions; their laws stack into one proposal."""
    narrow = DrawRow(SamplingParams(top_k=5), Rule.REJECTION, 0)
    wide = DrawRow(SamplingParams(), Rule.REJECTION, 0)
    logits = torch.randn(2, V)
    alone, beside = draw(logits[:1], [narrow], V)[0], draw(logits, [narrow, wide], V)[0]
    assert alone.tokens == beside.tokens
    assert DraftProbs.stack([alone.probs, beside.probs]).ids.shape == (2, DRAFT_SUPPORT)
    assert torch.equal(alone.probs.probs, beside.probs.probs)
    small = draw(torch.randn(1, 10), [narrow], 10)[0].probs
    assert small.ids.shape == (1, 10)


def test_mixed_draws_equal_each_alone():
    rows = [
        DrawRow(g.params, g.rule, g.position, width=1 + at % 5, scored=g.rule is Rule.TYPICAL)
        for at, g in enumerate(groups())
    ]
    logits = torch.randn(len(rows), V)
    for at, drawn in enumerate(draw(logits, rows, V)):
        own = draw(logits[at : at + 1], rows[at : at + 1], V)[0]
        assert drawn.tokens == own.tokens
        assert drawn.scores[: len(own.scores)] == own.scores
        q, own_q = drawn.probs, own.probs
        assert (q is None) == (own_q is None)
        assert q is None or (torch.equal(q.ids, own_q.ids) and torch.equal(q.probs, own_q.probs))


def test_draft_and_target_share_noise_under_coupled():
    """Equal logits give equal tokens wherever the target's choice is in the draft's support."""
    logits = 4 * torch.randn(500, 300, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(seed=s) for s in range(500)]
    drawn = draw(logits, [DrawRow(p, Rule.COUPLED, 6) for p in params], 300)
    judged = judge(logits, [RowGroup(p, Rule.COUPLED, 6) for p in params], 300)
    tokens = [children.tokens[0] for children in drawn]
    for row, (token, judgement) in enumerate(zip(tokens, judged, strict=True)):
        supported = judgement.emitted[0] in logits[row].topk(DRAFT_SUPPORT).indices.tolist()
        assert (token == judgement.emitted[0]) or not supported
    assert sum(t == j.emitted[0] for t, j in zip(tokens, judged, strict=True)) > 480


SICK = {
    "nan": torch.full((1, V), torch.nan),
    "one nan": torch.zeros(1, V).index_fill(1, torch.tensor([3]), torch.nan),
    "inf": torch.zeros(1, V).index_fill(1, torch.tensor([3]), torch.inf),
    "all masked": torch.full((1, V), -torch.inf),
}


@pytest.mark.parametrize("sick", list(SICK))
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 4}, {"top_p": 0.5}], ids=str)
def test_logits_without_a_finite_maximum_are_an_error(sick, rule, params):
    own = SamplingParams(**params)
    with pytest.raises(FloatingPointError):
        judge(SICK[sick], [RowGroup(own, rule, 0)], V)
    with pytest.raises(FloatingPointError):
        draw(SICK[sick], [DrawRow(own, rule, 0)], V)


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-30, 1e-6])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_smallest_temperatures_are_nearly_greedy(temperature, top_p):
    logits = 50 * torch.randn(3, V)
    own = SamplingParams(temperature=temperature, top_p=top_p)
    judged = judge(logits, [RowGroup(own, Rule.COUPLED, 0)] * 3, V)
    assert [j.emitted[0] for j in judged] == logits.argmax(-1).tolist()


def test_block_refuses_a_tree():
    tree = TokenTree((1, 2), (ROOT, ROOT))
    with pytest.raises(InvalidParameter, match="parents: block verification takes chains only"):
        judge(torch.randn(3, V), [RowGroup(SamplingParams(), Rule.BLOCK, 0, tree)], V)


def test_nothing_to_judge():
    assert judge(torch.zeros(0, V), [], V) == []
    assert step.draw(torch.zeros(0, V), [], V) == []
