"""Whole rounds of chains by enumeration: `block` and `rejection` leave the target's joint law, and
`block` accepts no less. Distributions depend on the whole prefix."""

import itertools

import numpy as np
import pytest
import torch

from specdec_ray.sampling.logits import Distribution
from specdec_ray.speculation.acceptance import block_law, rejection_law
from specdec_ray.speculation.proposal import Children, DraftProbs

KINDS = ["random", "equal", "disjoint", "one-hot q", "one-hot p", "truncated q", "mixed"]


def pair(kind, vocab, k, rng):
    """p and q after each prefix: one array [V ** depth, V] per depth, prefixes in order."""
    p = [rng.dirichlet(0.7 * np.ones(vocab), vocab**depth) for depth in range(k + 1)]
    q = [rng.dirichlet(0.7 * np.ones(vocab), vocab**depth) for depth in range(k)]
    low = np.arange(vocab) < (vocab + 1) // 2
    for depth in range(k):
        rows = vocab**depth
        if kind == "equal" or (kind == "mixed" and depth == 1):
            q[depth] = p[depth]
        elif kind == "disjoint" or (kind == "mixed" and depth == 2):
            p[depth], q[depth] = p[depth] * low, q[depth] * ~low
        elif kind == "one-hot q":
            q[depth] = np.eye(vocab)[rng.integers(vocab, size=rows)]
        elif kind == "one-hot p":
            p[depth] = np.eye(vocab)[rng.integers(vocab, size=rows)]
        elif kind == "truncated q":
            q[depth] = q[depth] * ~low
    return [[t / t.sum(-1, keepdims=True) for t in tables] for tables in (p, q)]


class Rounds:
    """Every chain of k tokens that the draft may propose, laid out as a target step has it."""

    def __init__(self, p, q, k):
        self.p, self.k, self.vocab = p, k, p[0].shape[1]
        chains = np.array(list(itertools.product(range(self.vocab), repeat=k)))
        prefixes = [self._index(chains[:, :depth]) for depth in range(k + 1)]
        drafted = [q[depth][prefixes[depth], chains[:, depth]] for depth in range(k)]
        chance = np.prod(drafted, axis=0)
        some = chance > 0
        self.chains, self.chance = chains[some], chance[some]
        prefixes = [prefix[some] for prefix in prefixes]
        n = len(self.chains)
        rows = np.stack([p[d][prefixes[d]] for d in range(k + 1)], 1).reshape(n * (k + 1), -1)
        laws = [q[d][prefixes[d]] for d in range(k)] + [np.ones((n, self.vocab))]
        ids = torch.arange(self.vocab).expand(len(rows), -1)
        self.target = Distribution(ids, torch.tensor(rows), all_ids=True)
        below = np.concatenate((self.chains, np.full((n, 1), -1)), 1).reshape(-1, 1)
        self.children = Children(
            torch.tensor(below),
            torch.arange(len(rows))[:, None],
            DraftProbs(ids, torch.tensor(np.stack(laws, 1).reshape(len(rows), -1))),
        )

    def stops(self, rule):
        """Chance [n, k + 1] that each accepted length ends a chain's round, and residuals."""
        shape = len(self.chains), self.k + 1
        if rule == "block":
            reach, residual = block_law(self.target, self.children, self.k)
            reach = reach.numpy().reshape(shape)
            assert (reach[:, 0] == 1).all()
            lost_below = np.cumprod(1 - reach[:, ::-1], 1)[:, ::-1]  # of this and deeper coins
            stop = reach * np.concatenate((lost_below[:, 1:], np.ones((shape[0], 1))), 1)
        else:
            accept, residual = rejection_law(self.target, self.children)
            accept = accept.numpy().reshape(shape)
            arrived = np.concatenate((np.ones((shape[0], 1)), np.cumprod(accept[:, :-1], 1)), 1)
            stop = arrived * (1 - accept)
        rest = residual.probs.numpy()
        return stop, (rest / rest.sum(-1, keepdims=True)).reshape(*shape, -1)

    def texts_law(self, rule):
        """Of k + 1 tokens: those of a round, then the target's own."""
        stop, residual = self.stops(rule)
        law = np.zeros(self.vocab ** (self.k + 1))
        for depth in range(self.k + 1):
            weight = (self.chance * stop[:, depth])[:, None] * residual[:, depth]
            texts = np.zeros((self.vocab**depth, self.vocab))
            np.add.at(texts, self._index(self.chains[:, :depth]), weight)
            texts = texts.reshape(-1)
            for later in range(depth + 1, self.k + 1):
                texts = (texts[:, None] * self.p[later]).reshape(-1)
            law += texts
        return law

    def accepted(self, rule):
        """Mean accepted length."""
        stop, _ = self.stops(rule)
        return float(self.chance @ stop @ np.arange(self.k + 1))

    def _index(self, prefixes):
        powers = self.vocab ** np.arange(prefixes.shape[1])[::-1]
        return (prefixes * powers).sum(1).astype(int)


def rounds_of(kind, vocab, k, count):
    rng = np.random.default_rng(100 * vocab + k)
    for _ in range(count):
        p, q = pair(kind, vocab, k, rng)
        yield Rounds(p, q, k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("vocab", [2, 3, 6])
def test_texts_of_a_round_have_the_targets_law(kind, k, vocab):
    for rounds in rounds_of(kind, vocab, k, 3 if vocab == 6 else 10):
        wanted = rounds.p[0].reshape(-1)
        for table in rounds.p[1:]:
            wanted = (wanted[:, None] * table).reshape(-1)
        for rule in ("rejection", "block"):
            assert np.abs(rounds.texts_law(rule) - wanted).max() < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_accepts_no_less_than_rejection(kind, k):
    gains = [r.accepted("block") - r.accepted("rejection") for r in rounds_of(kind, 3, k, 30)]
    assert min(gains) > -1e-12
    if kind == "random":
        # One drafted token leaves nothing to gain.
        assert np.mean(gains) > 0.01 if k > 1 else max(gains) < 1e-12


def test_the_papers_example():
    """p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 11/9 accepted against 10/9."""
    p = [np.tile([1 / 3, 2 / 3], (2**depth, 1)) for depth in range(3)]
    q = [np.tile([2 / 3, 1 / 3], (2**depth, 1)) for depth in range(2)]
    rounds = Rounds(p, q, 2)
    assert rounds.accepted("block") == pytest.approx(11 / 9, abs=1e-12)
    assert rounds.accepted("rejection") == pytest.approx(10 / 9, abs=1e-12)
