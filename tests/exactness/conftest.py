"""A toy pair whose distributions depend on the last token, and whole texts written with it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from specdec_ray.sampling.logits import RowParams, distribution
from specdec_ray.sampling.noise import Purpose
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.acceptance import block, coupled, race, rejection
from specdec_ray.speculation.proposal import Children, DraftProbs, Rule

START = 1


class Toy:
    """Logits float32 [V, V] of the token after each token."""

    def __init__(self, target: np.ndarray, draft: np.ndarray) -> None:
        self.vocab = len(target)
        self.target = torch.tensor(target).log().float()
        self.draft = torch.tensor(draft).log().float()

    def target_probs(self, params: SamplingParams) -> torch.Tensor:
        """Processed target distributions, float64 [V, V]."""
        sparse = distribution(self.target, rows_of(params, self.vocab))
        dense = torch.zeros(self.vocab, self.vocab).scatter(1, sparse.ids, sparse.probs)
        return dense.double()

    def texts_law(self, params: SamplingParams, length: int) -> np.ndarray:
        """Probability of every text of `length` tokens, flat in lexicographic order."""
        table = self.target_probs(params)
        law = table[START]
        for _ in range(length - 1):
            law = law[..., None] * table.reshape((1,) * (law.dim() - 1) + table.shape)
        return law.flatten().numpy()


def chain_of(tokens: torch.Tensor, draft: DraftProbs) -> Children:
    """One child below each of N rows, drawn from the row of `draft` of the same number."""
    return Children(tokens[:, None], torch.arange(len(tokens))[:, None], draft)


def rows_of(
    params: SamplingParams,
    n: int,
    position: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
) -> RowParams:
    """N rows of one request that differ by their seed, 0 to n - 1."""
    one = RowParams.of([params], [0], torch.device("cpu"))
    fields = ("temperature", "top_p", "min_p", "top_k", "choice", "position", "base")
    rows = replace(one, **{name: getattr(one, name).expand(n) for name in fields})
    rows = replace(rows, seed=torch.arange(n))
    if position is None:
        return rows
    return replace(rows, position=position, base=position if base is None else base)


def write(toy: Toy, params: SamplingParams, rule: Rule, k: int, n: int, length: int):
    """Texts int64 [n, length] of n seeds, each in as many rounds of k nodes as it takes."""
    text = torch.zeros(n, 1 + length + k + 1, dtype=torch.int64)
    text[:, 0] = START
    known = torch.ones(n, dtype=torch.int64)
    every = torch.arange(n)
    while int(known.min()) < 1 + length:
        context, ids, probs = [text[every, known - 1]], [], []
        for depth in range(k):
            rows = rows_of(params, n, known + depth, known)
            q = replace(distribution(toy.draft[context[-1]], rows, 64), complete=None)
            purpose = Purpose.COUPLED if rule is Rule.COUPLED else Purpose.DRAFT
            context.append(race(q, rows, purpose))
            ids.append(q.ids)
            probs.append(q.probs)
        taken, tokens = verify(toy, params, rule, known, context, ids, probs)
        accepted = taken.cumprod(1).sum(1)
        for depth in range(k + 1):
            drafted = context[min(depth + 1, k)]
            token = torch.where(depth < accepted, drafted, tokens[:, depth])
            alive = (depth <= accepted) & (known + depth < text.shape[1])
            text[every[alive], (known + depth)[alive]] = token[alive]
        known = (known + accepted + 1).clamp(max=text.shape[1])
    return text[:, 1 : 1 + length]


def verify(toy, params, rule, known, context, ids, probs):
    """The rule on n chains of k tokens: accepted children bool and tokens int64, [n, k + 1]."""
    n, rows_each = len(known), len(context)
    depth = torch.arange(rows_each)
    rows = rows_of(params, n)
    rows = replace(
        rows,
        **{
            name: getattr(rows, name).repeat_interleave(rows_each)
            for name in ("temperature", "top_p", "min_p", "top_k", "choice", "seed")
        },
        position=(known[:, None] + depth).flatten(),
        base=known.repeat_interleave(rows_each),
    )
    p = distribution(toy.target[torch.stack(context, 1).flatten()], rows)
    below = torch.stack([*context[1:], torch.full((n,), -1)], 1).flatten()
    if rule is Rule.COUPLED:
        tokens = coupled(p, rows)
        return (tokens == below).view(n, rows_each), tokens.view(n, rows_each)
    none = torch.zeros(n, toy.vocab)
    draft = DraftProbs(
        torch.stack([*ids, none.long()], 1).flatten(0, 1),
        torch.stack([*probs, none], 1).flatten(0, 1),
    )
    children = chain_of(below, draft)
    if rule is Rule.BLOCK:
        taken, tokens = block(p, rows, children, rows_each - 1)
    else:
        taken, tokens = rejection(p, rows, children)
    return taken.view(n, rows_each), tokens.view(n, rows_each)


def agrees(texts: torch.Tensor, law: np.ndarray, vocab: int) -> bool:
    """Chi-square at 1e-4, cells below 5 pooled; nothing may fall where the law has no mass."""
    index = torch.zeros(len(texts), dtype=torch.int64)
    for column in texts.T:
        index = index * vocab + column
    counts = np.bincount(index.numpy(), minlength=len(law))
    expected = law / law.sum() * len(texts)
    if counts[law < 1e-11].any():
        return False
    often = expected >= 5
    observed = [*counts[often], counts[~often].sum()]
    wanted = [*expected[often], expected[~often].sum()]
    if wanted[-1] < 5:  # too rare for a cell of its own
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    if len(wanted) == 1:
        return True
    wanted = np.array(wanted) / sum(wanted) * sum(observed)
    return bool(stats.chisquare(observed, wanted).pvalue > 1e-4)


@pytest.fixture(scope="session")
def make_toy() -> Callable[..., Toy]:
    """Toys by name: how target and draft relate."""

    def make(kind: str, vocab: int = 4, seed: int = 3) -> Toy:
        rng = np.random.default_rng(seed)
        target, draft = (rng.dirichlet(np.ones(vocab), vocab) for _ in range(2))
        if kind == "equal":
            draft = target
        elif kind == "one_hot_draft":
            draft = np.eye(vocab)[rng.permutation(vocab)]
        elif kind == "one_hot_target":
            target = np.eye(vocab)[rng.permutation(vocab)]
        elif kind == "disjoint":
            low = np.arange(vocab) < vocab // 2
            target, draft = target * low, draft * ~low
        elif kind == "peaked":
            target = rng.dirichlet(0.2 * np.ones(vocab), vocab)
        else:
            assert kind == "random"
        return Toy(*(table / table.sum(-1, keepdims=True) for table in (target, draft)))

    return make


@pytest.fixture(scope="session")
def write_texts():
    return write


@pytest.fixture(scope="session")
def follows_law():
    return agrees


@pytest.fixture(scope="session")
def below():
    return chain_of


@pytest.fixture(scope="session")
def seed_rows():
    return rows_of
