"""Six ways to bias speculative decoding that have been shipped elsewhere. Where the mistake can be
made in a few lines, the test makes it too, so that the check is known to notice."""

import numpy as np
import pytest
import torch

from specdec_ray.sampling.logits import Distribution
from specdec_ray.sampling.noise import Purpose, exponential, row_keys, uniform
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation import acceptance
from specdec_ray.speculation.acceptance import coupled, race, rejection, rejection_law
from specdec_ray.speculation.proposal import DraftProbs, Rule
from specdec_ray.speculation.step import DRAFT_SUPPORT, DrawRow, RowGroup, draw, judge
from specdec_ray.speculation.tree import TokenTree

N = 100_000


def every_row(probs) -> Distribution:
    p = torch.tensor(probs)
    return Distribution(torch.arange(len(p)).expand(N, -1), p.expand(N, -1), all_ids=True)


def draft_probs(law: Distribution) -> DraftProbs:
    return DraftProbs(law.ids, law.probs)


def test_1_a_drafted_token_is_never_dropped_for_its_own_q(below, seed_rows, follows_law):
    """Dropping x because q(x) is low hands the target a position that is no longer a draw from q;
    under coupling any pruning leaves the very same tokens."""
    p = np.array([0.9, 0.1])
    rows = seed_rows(SamplingParams(), N)
    law = every_row(p)
    drafted = race(law, rows, Purpose.DRAFT)
    accepted, replacement = rejection(law, rows, below(drafted, draft_probs(law)))
    emitted = torch.where(accepted[:, 0], drafted, replacement)
    assert follows_law(emitted[:, None], p, 2)

    dropped = law.probs.gather(1, drafted[:, None])[:, 0] < 0.5
    alone = race(law, rows, Purpose.RESIDUAL)
    assert not follows_law(torch.where(dropped, alone, emitted)[:, None], p, 2)

    logits = torch.tensor(p).log().float().expand(3 * 50, 2)
    texts = []
    for nodes in (0, 1, 2):  # pruned to nothing, to one node, not at all
        groups = []
        for seed in range(50):
            own = SamplingParams(seed=seed)
            chain = [
                drawn.tokens[0]
                for drawn in draw(
                    logits[:2], [DrawRow(own, Rule.COUPLED, position) for position in (5, 6)], 2
                )
            ][:nodes]
            groups.append(RowGroup(own, Rule.COUPLED, 5, TokenTree.chain(chain)))
        texts.append([j.emitted for j in judge(logits[: 50 * (nodes + 1)], groups, 2)])
    for short, long in zip(texts[0], texts[2], strict=True):
        assert long[:1] == short
    assert all(len(t) == 3 for t in texts[2])  # equal models agree on every token


def test_2_draft_and_residual_share_no_noise(below, seed_rows, follows_law, monkeypatch):
    p, q = np.array([0.05, 0.35, 0.3, 0.3]), np.full(4, 0.25)
    rows = seed_rows(SamplingParams(), N)
    target, draft = every_row(p), every_row(q)

    def emitted(purpose):
        drafted = race(draft, rows, purpose)
        accepted, replacement = rejection(target, rows, below(drafted, draft_probs(draft)))
        return torch.where(accepted[:, 0], drafted, replacement)[:, None]

    assert follows_law(emitted(Purpose.DRAFT), p, 4)
    assert not follows_law(emitted(Purpose.RESIDUAL), p, 4)  # what sharing would give


def test_2_the_toss_is_independent_of_the_draw_and_of_the_residual():
    seeds, zero = torch.arange(N), torch.zeros(N, dtype=torch.int64)
    coin = uniform(row_keys(seeds, zero, zero, Purpose.ACCEPT)).numpy()
    for purpose in (Purpose.DRAFT, Purpose.RESIDUAL, Purpose.COUPLED):
        noise = exponential(row_keys(seeds, zero, zero, purpose), torch.arange(3)).numpy()
        for token in range(3):
            assert abs(np.corrcoef(coin, noise[:, token])[0, 1]) < 0.015


def test_3_the_law_shipped_is_the_law_drawn_from(below, seed_rows, follows_law):
    """Raw q shipped for a draw from filtered q gives another law than the target's."""
    p, raw = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.2, 0.2])
    rows = seed_rows(SamplingParams(), N)
    target, filtered = every_row(p), every_row(np.array([0.75, 0.25, 0.0]))
    drafted = race(filtered, rows, Purpose.DRAFT)
    for shipped, exact in [(filtered, True), (every_row(raw), False)]:
        accepted, replacement = rejection(target, rows, below(drafted, draft_probs(shipped)))
        emitted = torch.where(accepted[:, 0], drafted, replacement)[:, None]
        assert follows_law(emitted, p, 3) is exact


@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.6}, {"top_k": 5}, {"temperature": 0.3}], ids=str
)
def test_3_draw_follows_what_it_ships(params):
    vocab, n = 300, 20_000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2)).expand(n, vocab)
    rows = [DrawRow(SamplingParams(seed=s, **params), Rule.REJECTION, 3) for s in range(n)]
    drawn = draw(logits, rows, vocab)
    ids, probs = drawn[0].probs.ids[0], drawn[0].probs.probs[0]
    tokens = torch.tensor([own.tokens[0] for own in drawn])
    assert ids.shape == (DRAFT_SUPPORT,)
    assert probs.dtype == torch.float32
    assert float(probs.double().sum()) == pytest.approx(1, abs=1e-6)
    assert all(torch.equal(own.probs.probs[0], probs) for own in drawn)
    counts = torch.bincount(tokens, minlength=vocab)[ids] / n
    assert (counts - probs).abs().max() < 0.012
    assert torch.isin(tokens, ids[probs > 0]).all()


def test_4_noise_is_fine_enough_for_a_large_vocabulary(seed_rows):
    """With 24 random bits 0.9% of positions would emit a token of probability 1e-12."""
    vocab, rows = 152_000, 300
    logits = torch.full((1, vocab), -27.0)
    logits[0, 7] = 0.0
    groups = [RowGroup(SamplingParams(seed=s), Rule.COUPLED, 0) for s in range(rows)]
    p_tail = float((vocab - 1) * torch.tensor(-27.0).exp())
    assert p_tail < 1e-6
    tokens = [j.emitted for j in judge(logits.expand(rows, vocab), groups, vocab)]
    assert tokens == [(7,)] * rows


def test_5_no_residual_mass_is_no_rejection(below, seed_rows):
    """p == q leaves nothing to draw from; that neither crashes nor is reached."""
    law = every_row(np.array([0.25, 0.75, 0.0]))
    rows = seed_rows(SamplingParams(), N)
    drafted = race(law, rows, Purpose.DRAFT)
    accept_probs, residual = rejection_law(law, below(drafted, draft_probs(law)))
    assert bool((accept_probs == 1).all())
    assert torch.equal(residual.probs, law.probs.double())
    accepted, token = rejection(law, rows, below(drafted, draft_probs(law)))
    assert bool(accepted.all())
    assert set(token.tolist()) == {0, 1}


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("params", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_6_noise_is_evaluated_on_the_support_only(monkeypatch, rule, params):
    vocab, widths = 152_000, []

    def counting(keys, token_ids):
        widths.append(token_ids.shape[-1])
        return exponential(keys, token_ids)

    monkeypatch.setattr(acceptance, "exponential", counting)
    logits = -1.5 * (1 + torch.arange(vocab).float()).log().expand(2, vocab)
    q = DraftProbs(torch.arange(64)[None], torch.full((1, 64), 1 / 64))
    groups = [
        RowGroup(SamplingParams(**params), rule, 0, TokenTree.chain([1]), q),
        RowGroup(SamplingParams(temperature=0), rule, 0),
    ]
    judge(logits[[0, 1, 0]], groups, vocab)
    draw(logits, [DrawRow(SamplingParams(**params), rule, 0)] * 2, vocab)
    assert max(widths) <= 1024
    assert widths[-1] == DRAFT_SUPPORT


def test_6_a_full_row_does_not_widen_the_others(monkeypatch):
    vocab, sizes = 5_000, []

    def counting(keys, token_ids):
        sizes.append((len(keys), token_ids.shape[-1]))
        return exponential(keys, token_ids)

    monkeypatch.setattr(acceptance, "exponential", counting)
    params = [SamplingParams(), *[SamplingParams(top_k=10)] * 7]
    judge(torch.randn(8, vocab), [RowGroup(p, Rule.COUPLED, 0) for p in params], vocab)
    assert sorted(sizes) == [(1, vocab), (7, 128)]


def test_coupled_draws_ignore_what_was_drawn_before(seed_rows):
    """Same seed and position, same token, however many draws came in between."""
    law = every_row(np.full(5, 0.2))
    rows = seed_rows(SamplingParams(), N)
    first = coupled(law, rows)
    race(law, rows, Purpose.DRAFT)
    assert torch.equal(coupled(law, rows), first)
