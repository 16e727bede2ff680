"""Typical acceptance: Medusa's threshold, and that it is lossy as its name says."""

import numpy as np
import pytest
import torch

from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.step import RowGroup, judge
from specdec_ray.speculation.tree import ROOT, TokenTree


def judged(p, tree, seeds=1, **params):
    logits = torch.tensor(p).log().float().expand(seeds * (1 + len(tree)), -1)
    groups = [
        RowGroup(SamplingParams(seed=seed, **params), Rule.TYPICAL, 0, tree)
        for seed in range(seeds)
    ]
    return judge(logits, groups, len(p))


@pytest.mark.parametrize(
    ("p", "accepted"),
    [
        ([0.905, 0.095], {0, 1}),  # 0.3 exp(-H) = 0.22 asks more than 0.09 does
        ([0.915, 0.085], {0}),
        (np.full(20, 0.05), set(range(20))),  # flat: 0.3 exp(-H) = 0.015
        ([0.001, *np.full(10, 0.0999)], set(range(1, 11))),
        ([0.02, *np.full(10, 0.098)], set(range(1, 11))),  # 0.3 exp(-H) = 0.028
        ([0.04, *np.full(10, 0.096)], set(range(11))),
    ],
)
def test_a_child_is_accepted_above_the_threshold(p, accepted):
    for token in range(len(p)):
        (judgement,) = judged(p, TokenTree.chain([token]))
        assert (len(judgement.path) == 1) is (token in accepted)


def test_the_threshold_follows_the_processed_distribution():
    p = [0.75, 0.25]
    cold = np.square(p) / np.square(p).sum()
    assert cold[1] > 0.09
    assert judged(p, TokenTree.chain([1]), temperature=0.5)[0].path == (0,)
    assert judged(p, TokenTree.chain([1]), temperature=0.4)[0].path == ()
    assert judged(p, TokenTree.chain([1]), top_k=1)[0].path == ()


def test_the_first_typical_child_of_a_tree_is_followed():
    tree = TokenTree((2, 1, 0, 0), (ROOT, ROOT, ROOT, 1))
    (judgement,) = judged([0.5, 0.45, 0.05], tree)
    assert judgement.path == (1, 3)


def test_a_row_without_a_typical_child_draws_from_p(follows_law):
    p = np.array([0.6, 0.37, 0.03])
    texts = torch.tensor([j.emitted for j in judged(p, TokenTree.chain([2]), 5_000)])
    assert texts.shape == (5_000, 1)
    assert follows_law(texts, p, 3)


def test_it_is_lossy(follows_law):
    """A drafted token that is likely enough is always taken, whatever its probability."""
    p = np.array([0.6, 0.4])
    texts = torch.tensor([j.emitted[:1] for j in judged(p, TokenTree.chain([1]), 1_000)])
    assert not follows_law(texts, p, 2)
    assert set(texts.flatten().tolist()) == {1}
    assert [rule for rule in Rule if not rule.lossless] == [Rule.TYPICAL]
