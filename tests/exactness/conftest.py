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
        sparse = distribution(
            self.target, rows_of(params, torch.zeros(self.vocab, dtype=torch.int64))
        )
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
    seeds: torch.Tensor,
    position: torch.Tensor | int = 0,
    base: torch.Tensor | int = 0,
) -> RowParams:
    """Rows of one request that differ by their seed, int64 [N]; positions [N] or one for all."""
    one = RowParams.of([params], [0], torch.device("cpu"))
    n = len(seeds)
    fields = ("temperature", "top_p", "min_p", "top_k", "choice")
    return replace(
        one,
        **{name: getattr(one, name).expand(n) for name in fields},
        seed=seeds,
        position=torch.as_tensor(position).expand(n),
        base=torch.as_tensor(base).expand(n),
    )


def write(toy: Toy, params: SamplingParams, rule: Rule, k: int, n: int, length: int):
    """Texts int64 [n, length] of n seeds, each in as many rounds of k nodes as it takes."""
    text = torch.zeros(n, 1 + length + k + 1, dtype=torch.int64)
    text[:, 0] = START
    known = torch.ones(n, dtype=torch.int64)
    while len(open_ := (known < 1 + length).nonzero()[:, 0]):
        emitted, count = play_round(toy, params, rule, k, open_, known[open_], text)
        for depth in range(k + 1):
            alive = depth < count
            text[open_[alive], (known[open_] + depth)[alive]] = emitted[alive, depth]
        known[open_] += count
    return text[:, 1 : 1 + length]


def play_round(toy, params, rule, k, seeds, base, text):
    """A round of each text: emitted tokens int64 [N, k + 1], and how many of them count."""
    n = len(seeds)
    context, laws = [text[seeds, base - 1]], []
    for depth in range(k):
        rows = rows_of(params, seeds, base + depth, base)
        law = replace(distribution(toy.draft[context[-1]], rows, 64), complete=None)
        purpose = Purpose.COUPLED if rule is Rule.COUPLED else Purpose.DRAFT
        context.append(race(law, rows, purpose))
        laws.append(law)
    drafted = torch.stack([*context[1:], torch.full((n,), -1)], 1)
    width = laws[0].ids.shape[1] if laws else 1
    none = torch.zeros(n, width)
    draft = DraftProbs(
        torch.stack([*(law.ids for law in laws), none.long()], 1).flatten(0, 1),
        torch.stack([*(law.probs for law in laws), none], 1).flatten(0, 1),
    )
    depths = torch.arange(k + 1)
    rows = rows_of(
        params,
        seeds.repeat_interleave(k + 1),
        (base[:, None] + depths).flatten(),
        base.repeat_interleave(k + 1),
    )
    p = distribution(toy.target[torch.stack(context, 1).flatten()], rows)
    taken, tokens = verify(p, rows, rule, drafted.flatten(), draft, k)
    accepted = taken.view(n, k + 1).cumprod(1).sum(1)
    emitted = torch.where(depths < accepted[:, None], drafted, tokens.view(n, k + 1))
    return emitted, accepted + 1


def verify(p, rows, rule, drafted, draft, k):
    """The rule on the rows of chains: accepted children bool, and tokens int64, [N] each."""
    if rule is Rule.COUPLED:
        tokens = coupled(p, rows)
        return tokens == drafted, tokens
    children = chain_of(drafted, draft)
    taken, tokens = (
        block(p, rows, children, k) if rule is Rule.BLOCK else rejection(p, rows, children)
    )
    return taken[:, 0], tokens


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
    """N rows of one request that differ by their seed."""
    return lambda params, n: rows_of(params, torch.arange(n))
