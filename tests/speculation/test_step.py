import pytest
import torch

from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import DraftProbs, Rule
from specdec_ray.speculation.step import DRAFT_SUPPORT, DrawRow, RowGroup, draw, judge
from specdec_ray.speculation.tree import ROOT, TokenTree

V = 300


def groups():
    """One of everything: rules, parameters, lengths, no tree at all, a branching tree."""
    ids = torch.arange(8).expand(3, 8)
    q = DraftProbs(ids, torch.full((3, 8), 1 / 8))
    chain = TokenTree.chain((1, 2, 3))
    return [
        RowGroup(SamplingParams(temperature=0), Rule.COUPLED, 5, TokenTree.chain((4, 4))),
        RowGroup(SamplingParams(seed=1), Rule.COUPLED, 9),
        RowGroup(SamplingParams(seed=2, top_k=5), Rule.COUPLED, 9, chain),
        RowGroup(SamplingParams(seed=3, top_p=0.7), Rule.REJECTION, 2, chain, q),
        RowGroup(SamplingParams(seed=4), Rule.REJECTION, 7),
        RowGroup(SamplingParams(temperature=0), Rule.REJECTION, 7, chain),
        RowGroup(SamplingParams(seed=5), Rule.COUPLED, 1, TokenTree((1, 2, 3), (ROOT, ROOT, 1))),
    ]


def test_a_mixed_batch_equals_each_session_alone():
    torch.manual_seed(0)
    all_groups = groups()
    logits = [torch.randn(1 + len(g.tree), V) for g in all_groups]
    together = judge(torch.cat(logits), all_groups, V)
    alone = [judge(own, [g], V)[0] for own, g in zip(logits, all_groups, strict=True)]
    assert together == alone


def test_padding_of_the_embedding_is_never_emitted():
    logits = torch.zeros(200, V)
    logits[:, V - 50 :] = 10.0
    batch = [RowGroup(SamplingParams(seed=s, temperature=5), Rule.COUPLED, 0) for s in range(199)]
    batch.append(RowGroup(SamplingParams(temperature=0), Rule.COUPLED, 0))
    emitted = [j.emitted[0] for j in judge(logits, batch, vocab_limit=V - 50)]
    assert max(emitted) < V - 50


def test_shipped_q_is_the_q_that_was_sampled_from():
    """Tokens drawn over many seeds follow the shipped float32 numbers, filters included."""
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(2)).expand(20_000, V)
    rows = [DrawRow(SamplingParams(seed=s, top_p=0.6), Rule.REJECTION, 3) for s in range(20_000)]
    drawn = draw(logits, rows, V)
    ids, probs = drawn[0][1].ids[0], drawn[0][1].probs[0]
    assert ids.shape == (DRAFT_SUPPORT,)
    assert float(probs.sum()) == pytest.approx(1, abs=1e-6)
    counts = torch.bincount(torch.tensor([t for t, _ in drawn]), minlength=V)[ids] / 20_000
    assert (counts - probs).abs().max() < 0.012
    assert torch.isin(torch.tensor([t for t, _ in drawn]), ids[probs > 0]).all()


def test_coupled_and_greedy_drafts_ship_no_q():
    rows = [DrawRow(SamplingParams(), Rule.COUPLED, 0)]
    rows.append(DrawRow(SamplingParams(temperature=0), Rule.REJECTION, 0))
    assert [q for _, q in draw(torch.randn(2, V), rows, V)] == [None, None]


def test_draft_and_target_share_noise_under_coupled():
    """Equal logits give equal tokens wherever the target's choice is in the draft's support."""
    logits = 4 * torch.randn(500, V, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(seed=s) for s in range(500)]
    drawn = draw(logits, [DrawRow(p, Rule.COUPLED, 6) for p in params], V)
    judged = judge(logits, [RowGroup(p, Rule.COUPLED, 6) for p in params], V)
    same = sum(t == j.emitted[0] for (t, _), j in zip(drawn, judged, strict=True))
    assert same > 480


def test_nan_logits_are_an_error():
    logits = torch.full((1, V), torch.nan)
    with pytest.raises(FloatingPointError):
        judge(logits, [RowGroup(SamplingParams(), Rule.COUPLED, 0)], V)
