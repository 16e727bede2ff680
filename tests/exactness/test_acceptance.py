"""The walk, and what each rule does in the cases that implementations get wrong."""

import numpy as np
import pytest
import torch

from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.acceptance import walk
from specdec_ray.speculation.proposal import DraftProbs, Rule
from specdec_ray.speculation.step import DrawRow, RowGroup, draw, judge
from specdec_ray.speculation.tree import ROOT, TokenTree


def play(toy, params, rule, k, rounds, last=1):
    """One round each of sessions with seeds 0..rounds-1, through the engines' two entries."""
    own = [SamplingParams(**params, seed=seed) for seed in range(rounds)]
    drafted, probs = [[] for _ in own], [[] for _ in own]
    tails = torch.full((rounds,), last)
    for step in range(k):
        rows = [DrawRow(p, rule, 10 + step, depth=step) for p in own]
        drawn = draw(toy.draft[tails], rows, vocab_limit=toy.vocab)
        for i, own_drawn in enumerate(drawn):
            drafted[i] += own_drawn.tokens
            probs[i].append(own_drawn.probs)
        tails = torch.tensor([own_drawn.tokens[0] for own_drawn in drawn])
    groups = [
        RowGroup(p, rule, 10, TokenTree.chain(d), DraftProbs.stack(q) if k and q[0] else None)
        for p, d, q in zip(own, drafted, probs, strict=True)
    ]
    contexts = torch.tensor([[last, *tokens] for tokens in drafted]).flatten()
    return judge(toy.target[contexts], groups, vocab_limit=toy.vocab), drafted


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule.lossless])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"temperature": 0.7, "top_k": 3}], ids=str)
def test_rounds_of_the_two_entries_have_the_targets_law(make_toy, follows_law, rule, params):
    toy = make_toy("random")
    judgements, _ = play(toy, params, rule, k=2, rounds=5_000)
    first = torch.tensor([j.emitted[:1] for j in judgements])
    assert follows_law(first, toy.texts_law(SamplingParams(**params), 1), toy.vocab)


def test_a_full_acceptance_draws_the_bonus_from_p(make_toy, follows_law):
    toy = make_toy("equal")
    judgements, _ = play(toy, {}, Rule.REJECTION, k=1, rounds=8_000)
    texts = torch.tensor([j.emitted for j in judgements])  # p == q: nothing is ever rejected
    assert texts.shape == (8_000, 2)
    assert follows_law(texts, toy.texts_law(SamplingParams(), 2), toy.vocab)


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("rule", list(Rule))
def test_rejection_at_every_offset_replaces_that_very_token(rule, offset):
    """The target writes 5, 6, 7, 8 for certain; the proposal is wrong from `offset` on."""
    logits = torch.full((4, 10), -torch.inf)
    logits[range(4), [5, 6, 7, 8]] = 0.0
    tokens = [5, 6, 7][: offset - 1] + [9] * (4 - offset)
    q = DraftProbs(torch.tensor(tokens)[:, None], torch.ones(3, 1))
    group = RowGroup(SamplingParams(), rule, 3, TokenTree.chain(tokens), q)
    (judgement,) = judge(logits, [group], 10)
    assert len(judgement.path) == offset - 1
    assert judgement.emitted == (5, 6, 7)[:offset]


def test_last_candidate_can_be_rejected(make_toy):
    """With one drafted token and disjoint supports, every round takes the residual's token."""
    toy = make_toy("disjoint")
    judgements, _ = play(toy, {}, Rule.REJECTION, k=1, rounds=200)
    assert {j.path for j in judgements} == {()}
    assert {j.emitted[0] for j in judgements} == {0, 1}


@pytest.mark.parametrize("rule", list(Rule))
def test_temperature_zero_is_argmax_whatever_the_draft_says(rule):
    """p = (.3, .5, .2) against q = (.6, .2, .2): token 1, drafted or not."""
    logits = torch.tensor([[0.3, 0.5, 0.2]] * 2).log()
    q = DraftProbs(torch.arange(3)[None], torch.tensor([[0.6, 0.2, 0.2]]))
    for drafted, accepted in [(0, 0), (1, 1), (2, 0)]:
        group = RowGroup(SamplingParams(temperature=0), rule, 0, TokenTree.chain([drafted]), q)
        (judgement,) = judge(logits, [group], 3)
        assert len(judgement.path) == accepted
        assert judgement.emitted[0] == 1


def test_temperature_zero_takes_the_branch_of_the_argmax():
    """The first child is second best, the second child is right; likewise one level down."""
    tree = TokenTree((0, 1, 2, 0), (ROOT, ROOT, 1, 1))
    logits = torch.tensor([[0.4, 0.5, 0.1]] * 2 + [[0.6, 0.1, 0.3]] * 3).log()
    (judgement,) = judge(
        logits, [RowGroup(SamplingParams(temperature=0), Rule.COUPLED, 0, tree)], 3
    )
    assert judgement.path == (1, 3)
    assert judgement.emitted == (1, 0, 0)


@pytest.mark.parametrize("q", [None, DraftProbs(torch.tensor([[2]]), torch.ones(1, 1))])
def test_deterministic_proposal_is_accepted_with_its_probability(follows_law, q):
    """q is one-hot: accept with p(x), and the residual is p without x."""
    n = 10_000
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(2 * n, 3)
    tree = TokenTree.chain([2])
    groups = [RowGroup(SamplingParams(seed=s), Rule.REJECTION, 4, tree, q) for s in range(n)]
    judgements = judge(logits, groups, 3)
    assert np.mean([len(j.path) for j in judgements]) == pytest.approx(0.2, abs=0.015)
    assert all(j.emitted[0] != 2 for j in judgements if not j.path)
    first = torch.tensor([j.emitted[:1] for j in judgements])
    assert follows_law(first, np.array([0.5, 0.3, 0.2]), 3)


def test_coupled_acceptance_is_what_theory_says(make_toy):
    """sum_x 1 / sum_y max(p_y/p_x, q_y/q_x) per token (Daliri, Musco, Suresh 2024)."""
    toy = make_toy("random")
    p, q = toy.target[1].double().exp().numpy(), toy.draft[1].double().exp().numpy()
    expected = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(toy.vocab))
    judgements, _ = play(toy, {}, Rule.COUPLED, k=1, rounds=20_000)
    assert np.mean([len(j.path) for j in judgements]) == pytest.approx(expected, abs=0.012)


def test_rejection_acceptance_is_the_optimum(make_toy):
    """sum_x min(p, q): no rule for one drafted token accepts more often."""
    toy = make_toy("random")
    expected = float(torch.minimum(toy.target[1].exp(), toy.draft[1].exp()).sum())
    judgements, _ = play(toy, {}, Rule.REJECTION, k=1, rounds=20_000)
    assert np.mean([len(j.path) for j in judgements]) == pytest.approx(expected, abs=0.012)


WALKS = [
    # parents, drafted tokens, rows' tokens, path, emitted
    ((), (), [9], (), (9,)),
    ((ROOT, 0), (1, 2), [1, 2, 3], (0, 1), (1, 2, 3)),
    ((ROOT, 0), (1, 2), [1, 5, 3], (0,), (1, 5)),
    ((ROOT, 0), (1, 2), [4, 2, 3], (), (4,)),
    ((ROOT, ROOT, 1), (1, 2, 3), [2, 0, 3, 7], (1, 2), (2, 3, 7)),
    ((ROOT, ROOT, 0, 1), (1, 2, 5, 6), [2, 5, 6, 0, 8], (1, 3), (2, 6, 8)),
    # below the branch not taken everything is right, and does not count
    ((ROOT, ROOT, 0, 2), (1, 2, 5, 6), [2, 5, 4, 6, 8], (1,), (2, 4)),
    # two equal siblings: one path
    ((ROOT, ROOT, 0), (1, 1, 2), [1, 2, 2, 9], (0, 2), (1, 2, 9)),
    # breadth first order, third level on the last branch
    (
        (ROOT, ROOT, ROOT, 2, 2, 4),
        (1, 2, 3, 4, 5, 6),
        [3, 0, 0, 5, 0, 6, 7],
        (2, 4, 5),
        (3, 5, 6, 7),
    ),
]


@pytest.mark.parametrize(("parents", "tokens", "rows", "path", "emitted"), WALKS)
def test_walk_follows_the_rows_tokens(parents, tokens, rows, path, emitted):
    tree = TokenTree(tokens, parents)
    accepted = [rows[p + 1] == t for p, t in zip(parents, tokens, strict=True)]
    judgement = walk(tree, rows, accepted)
    assert judgement.path == path
    assert judgement.emitted == emitted


def test_walk_stops_at_a_toss_that_failed_even_if_later_ones_won():
    judgement = walk(TokenTree.chain((1, 2, 3)), [7, 8, 9, 6], [True, False, True])
    assert judgement.path == (0,)
    assert judgement.emitted == (1, 8)
