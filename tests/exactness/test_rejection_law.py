"""The rejection rule as probabilities, no sampling: its output law is the target's to 1e-9."""

import numpy as np
import pytest
import torch

from specdec_ray.sampling.logits import Distribution
from specdec_ray.speculation.acceptance import rejection_law
from specdec_ray.speculation.proposal import Children, DraftProbs

RNG = np.random.default_rng(0)
PAIRS = {
    "random": (RNG.dirichlet(np.ones(5)), RNG.dirichlet(np.ones(5))),
    "crossed": (np.array([0.9, 0.1, 0, 0, 0]), np.array([0.1, 0.9, 0, 0, 0])),
    "equal": (np.full(5, 0.2), np.full(5, 0.2)),
    "disjoint": (np.array([0.5, 0.5, 0, 0, 0]), np.array([0, 0, 0.5, 0.25, 0.25])),
    "one-hot q": (np.array([0.3, 0.5, 0.2, 0, 0]), np.array([0, 1.0, 0, 0, 0])),
    "one-hot p": (np.array([0, 0, 1.0, 0, 0]), np.array([0.2, 0.2, 0.2, 0.2, 0.2])),
    "one-hot p and q": (np.array([0, 1.0, 0, 0, 0]), np.array([0, 1.0, 0, 0, 0])),
    "truncated q": (RNG.dirichlet(np.ones(5)), np.array([0.7, 0.3, 0, 0, 0])),
    "truncated p": (np.array([0.6, 0, 0.4, 0, 0]), RNG.dirichlet(np.ones(5))),
}


def shuffled(p: np.ndarray, rows: int, rng: np.random.Generator) -> Distribution:
    """p on its own support in random order, as filters leave it."""
    support = rng.permutation(np.flatnonzero(p))
    return Distribution(
        torch.tensor(support).expand(rows, -1), torch.tensor(p[support]).expand(rows, -1)
    )


def whole(p: np.ndarray, rows: int, rng: np.random.Generator) -> Distribution:
    ids = torch.arange(len(p)).expand(rows, -1)
    return Distribution(ids, torch.tensor(p).expand(rows, -1), all_ids=True)


def sparse_q(q: np.ndarray, rows: int, rng: np.random.Generator) -> DraftProbs:
    """q on its support in random order, with a column of padding."""
    support = rng.permutation(np.flatnonzero(q))
    ids, probs = np.append(support, 0), np.append(q[support], 0.0)
    return DraftProbs(torch.tensor(ids).expand(rows, -1), torch.tensor(probs).expand(rows, -1))


def laws(p, q, as_target=whole):
    """The real function's acceptance probability of every child and its residual, normalised."""
    rng = np.random.default_rng(1)
    n = len(p)
    children = Children(torch.arange(n)[:, None], torch.arange(n)[:, None], sparse_q(q, n, rng))
    accept, residual = rejection_law(as_target(p, n, rng), children)
    dense = torch.zeros(n, n, dtype=torch.float64).scatter(1, residual.ids, residual.probs)
    return accept[:, 0].numpy(), (dense / dense.sum(-1, keepdim=True)).numpy()


@pytest.mark.parametrize("as_target", [whole, shuffled])
@pytest.mark.parametrize("pair", list(PAIRS))
def test_output_law_of_one_token(pair, as_target):
    p, q = PAIRS[pair]
    accept, residual = laws(p, q, as_target)
    law = q * accept + ((q * (1 - accept))[:, None] * residual).sum(0)
    assert np.abs(law - p).max() < 1e-9
    for x in np.flatnonzero(q):
        assert accept[x] == pytest.approx(min(1, p[x] / q[x]), abs=1e-12)
    left = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    wanted = np.array(left) / sum(left) if sum(left) else p
    assert np.abs(residual[q > 0] - wanted).max() < 1e-9


def test_a_row_without_a_child_draws_from_the_whole_p():
    p = PAIRS["random"][0]
    accept, residual = rejection_law(
        whole(p, 1, RNG),
        Children(
            torch.tensor([[-1]]),
            torch.tensor([[0]]),
            DraftProbs(torch.zeros(1, 4).long(), torch.ones(1, 4)),
        ),
    )
    assert float(accept[0, 0]) == 0
    assert np.abs(residual.probs[0].numpy() - p).max() < 1e-12
