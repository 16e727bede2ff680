"""Rejection below a row with several children: the same law, analytically and as judged."""

import itertools

import numpy as np
import pytest
import torch

from specdec_ray.sampling.logits import Distribution
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.acceptance import rejection_law
from specdec_ray.speculation.proposal import Children, DraftProbs, Rule
from specdec_ray.speculation.step import RowGroup, judge
from specdec_ray.speculation.tree import ROOT, TokenTree


def without_replacement(q, count):
    """Ordered draws of `count` ids from q, as far as its support goes, and their chances."""
    count = min(count, int(np.count_nonzero(q)))
    draws = list(itertools.permutations(np.flatnonzero(q), count))
    chances = []
    for drawn in draws:
        chance, left = 1.0, 1.0
        for token in drawn:
            chance *= q[token] / left
            left = max(left - q[token], 1e-300)
        chances.append(chance)
    return np.array(draws), np.array(chances)


def emitted_law(p, draws, chances, q):
    """What the rule's own laws emit below a row whose children are drawn as given.

    Args:
        q: [V], or [draws, siblings, V] where siblings have laws of their own.
    """
    n, siblings = draws.shape
    vocab = len(p)
    every = np.broadcast_to(q, (n, siblings, vocab)).reshape(n * siblings, vocab)
    children = Children(
        torch.tensor(draws),
        torch.arange(n * siblings).view(n, siblings),
        DraftProbs(torch.arange(vocab).expand(n * siblings, -1), torch.tensor(every.copy())),
    )
    ids = torch.arange(vocab).expand(n, -1)
    accept, residual = rejection_law(
        Distribution(ids, torch.tensor(p).expand(n, -1), all_ids=True), children
    )
    law, alive = np.zeros(vocab), chances.copy()
    for rank in range(siblings):
        np.add.at(law, draws[:, rank], alive * accept[:, rank].numpy())
        alive *= 1 - accept[:, rank].numpy()
    rest = residual.probs.numpy()
    return law + (alive[:, None] * rest / rest.sum(-1, keepdims=True)).sum(0)


def random_pair(vocab, kind, rng):
    p, q = rng.dirichlet(0.7 * np.ones(vocab), 2)
    if kind == "disjoint":
        low = np.arange(vocab) < vocab // 2
        p, q = p * low, q * ~low
    elif kind == "equal":
        p = q
    elif kind == "one-hot p":
        p = np.eye(vocab)[rng.integers(vocab)]
    elif kind == "truncated q":
        q = q * (q >= np.sort(q)[-2])
    elif kind == "truncated p":
        p = p * (p >= np.sort(p)[-2])
    return p / p.sum(), q / q.sum()


KINDS = ["random", "disjoint", "equal", "one-hot p", "truncated q", "truncated p"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("vocab", [2, 3, 6])
def test_siblings_drawn_without_replacement(kind, siblings, vocab):
    rng = np.random.default_rng(vocab)
    for _ in range(5):
        p, q = random_pair(vocab, kind, rng)
        law = emitted_law(p, *without_replacement(q, siblings), q)
        assert np.abs(law - p).max() < 1e-9


@pytest.mark.parametrize("siblings", [2, 3])
def test_deterministic_siblings_and_repeated_ones(siblings):
    """One-hot q each; a repeated token is passed over, and nothing is drawn twice."""
    p = np.random.default_rng(1).dirichlet(np.ones(4))
    for tokens in itertools.product(range(4), repeat=siblings):
        law = emitted_law(p, np.array([tokens]), np.ones(1), np.eye(4)[[tokens]])
        assert np.abs(law - p).max() < 1e-9


def test_a_second_sibling_is_accepted_as_the_residual_says():
    """p = (.5, .3, .2), q = (.2, .2, .6): after 2 is rejected, r = (.75, .25, 0), q = (.5, .5)."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]]).double()
    ids = torch.arange(3)[None]
    for second, chance in [(0, 1.0), (1, 0.5)]:
        children = Children(torch.tensor([[2, second]]), torch.tensor([[0, 0]]), DraftProbs(ids, q))
        accept, residual = rejection_law(Distribution(ids, p.double(), all_ids=True), children)
        assert accept[0].tolist() == pytest.approx([1 / 3, chance], abs=1e-7)
        rest = residual.probs[0] / residual.probs.sum()
        assert rest.tolist() == pytest.approx([1, 0, 0], abs=1e-7)


# Parents of each node; depth 2 below both children of the root, in both orders of nodes.
SHAPES = {"breadth": (ROOT, ROOT, 0, 0, 1, 1), "depth": (ROOT, 0, 0, ROOT, 3, 3)}


def grown(toy, parents, rng, shared):
    """A tree of real draws below token 1, siblings without replacement, and each node's q."""
    tokens, laws = [], []
    table = toy.draft.double().exp().numpy()
    for node, parent in enumerate(parents):
        law = table[1 if parent == ROOT else tokens[parent]]
        left = law.copy()
        left[[t for t, p in zip(tokens, parents[:node], strict=True) if p == parent]] = 0
        tokens.append(int(rng.choice(len(law), p=left / left.sum())))
        laws.append(law)
    q = DraftProbs(torch.arange(toy.vocab).expand(len(tokens), -1), torch.tensor(np.array(laws)))
    return TokenTree(tuple(tokens), parents), q if shared else None


@pytest.mark.parametrize(
    ("rule", "shape", "kind"),
    [
        (Rule.REJECTION, "breadth", "random"),
        (Rule.REJECTION, "depth", "peaked"),
        (Rule.COUPLED, "depth", "random"),
    ],
)
def test_judged_trees_have_the_targets_joint_law(make_toy, follows_law, shape, rule, kind):
    """Three tokens: those a round emits, and the target's own after them."""
    toy, rng = make_toy(kind, vocab=3), np.random.default_rng(5)
    n = 12_000
    trees = [grown(toy, SHAPES[shape], rng, True) for _ in range(n)]
    groups = [
        RowGroup(SamplingParams(seed=seed), rule, 10, tree, q)
        for seed, (tree, q) in enumerate(trees)
    ]
    contexts = torch.tensor([[1, *tree.tokens] for tree, _ in trees]).flatten()
    judged = judge(toy.target[contexts], groups, toy.vocab)
    lengths = np.bincount([len(j.emitted) for j in judged], minlength=4)
    assert (lengths[1:] > 300).all()
    table = toy.target.double().exp().numpy()
    texts = []
    for judgement in judged:
        text = list(judgement.emitted)
        while len(text) < 3:
            text.append(int(rng.choice(3, p=table[text[-1]] / table[text[-1]].sum())))
        texts.append(text)
    assert follows_law(torch.tensor(texts), toy.texts_law(SamplingParams(), 3), toy.vocab)
