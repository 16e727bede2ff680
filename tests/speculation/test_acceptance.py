"""The law of what a round emits, against the target's own, for every rule."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from specdec_ray.sampling.logits import Distribution, RowParams, distribution
from specdec_ray.sampling.noise import Purpose
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.acceptance import race, rejection, walk
from specdec_ray.speculation.proposal import DraftProbs, Rule
from specdec_ray.speculation.step import DrawRow, RowGroup, draw, judge
from specdec_ray.speculation.tree import ROOT, TokenTree

V = 4
CPU = torch.device("cpu")


class Toy:
    """A target and a draft over V tokens whose distributions depend on the last token."""

    def __init__(self, target, draft):
        self.target = torch.tensor(target, dtype=torch.float64).log()
        self.draft = torch.tensor(draft, dtype=torch.float64).log()


def random_table(rng, kind):
    tables = {
        "random": rng.dirichlet(np.ones(V), V),
        "peaked": rng.dirichlet(0.2 * np.ones(V), V).clip(1e-6),
        "flat": np.full((V, V), 1 / V),
        "one_hot": np.eye(V)[rng.permutation(V)].clip(1e-12),
    }
    table = tables[kind]
    return table / table.sum(-1, keepdims=True)


def disjoint():
    target, draft = np.zeros((V, V)), np.zeros((V, V))
    target[:, :2], draft[:, 2:] = 0.5, 0.5
    return target.clip(1e-12), draft.clip(1e-12)


PAIRS = {
    "random": lambda rng: (random_table(rng, "random"), random_table(rng, "random")),
    "peaked": lambda rng: (random_table(rng, "peaked"), random_table(rng, "random")),
    "equal": lambda rng: (table := random_table(rng, "random"), table),
    "one_hot_draft": lambda rng: (random_table(rng, "random"), random_table(rng, "one_hot")),
    "disjoint": lambda rng: disjoint(),
}


def play(toy, params, rule, k, rounds):
    """Play rounds from one context with seeds 0..rounds-1; emitted tokens padded to k + 1."""
    start, position = 0, 10
    own = [SamplingParams(**params, seed=seed) for seed in range(rounds)]
    drafted, probs = [[] for _ in own], [[] for _ in own]
    last = torch.full((rounds,), start)
    for step in range(k):
        rows = [DrawRow(p, rule, position + step) for p in own]
        drawn = draw(toy.draft[last].float(), rows, vocab_limit=V)
        for i, (token, q) in enumerate(drawn):
            drafted[i].append(token)
            probs[i].append(q)
        last = torch.tensor([token for token, _ in drawn])
    groups = [
        RowGroup(
            p,
            rule,
            position,
            TokenTree.chain(tokens),
            DraftProbs.stack(q) if k and q[0] is not None else None,
        )
        for p, tokens, q in zip(own, drafted, probs, strict=True)
    ]
    contexts = torch.tensor([[start, *tokens] for tokens in drafted]).flatten()
    return judge(toy.target[contexts].float(), groups, vocab_limit=V)


def chain_law(toy, params, length):
    """Probability of every sequence of `length` tokens under the processed target."""
    rows = RowParams.of([SamplingParams(**params)] * V, [0] * V, CPU)
    sparse = distribution(toy.target.float(), rows)
    table = torch.zeros(V, V).scatter(1, sparse.ids, sparse.probs).double().numpy()
    law = {}
    for sequence in itertools.product(range(V), repeat=length):
        path = (0, *sequence)
        law[sequence] = np.prod([table[a, b] for a, b in itertools.pairwise(path)])
    return law


def assert_law(samples, law):
    keys = [key for key, p in law.items() if p * len(samples) >= 5]
    counts = dict.fromkeys(law, 0)
    for sample in samples:
        counts[sample] += 1
    rest = len(samples) - sum(counts[key] for key in keys)
    observed = [*(counts[key] for key in keys), rest]
    expected = [*(law[key] for key in keys), max(1 - sum(law[key] for key in keys), 1e-12)]
    if expected[-1] * len(samples) < 5:
        assert rest <= 20, "tokens that the target does not emit"
        observed, expected = observed[:-1], expected[:-1]
    expected = np.array(expected) / sum(expected) * sum(observed)
    if len(observed) > 1:
        assert stats.chisquare(observed, expected).pvalue > 1e-4


SETTINGS = [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 2}, {"min_p": 0.3}]


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("pair", list(PAIRS))
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_first_tokens_of_a_round_have_the_targets_law(rule, pair, params):
    toy = Toy(*PAIRS[pair](np.random.default_rng(3)))
    judgements = play(toy, params, rule, k=2, rounds=8_000)
    assert_law([j.emitted[:1] for j in judgements], chain_law(toy, params, 1))


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("k", [1, 3])
def test_joint_law_over_rounds(rule, k):
    """The first three tokens jointly, taking further rounds where one was too short."""
    toy = Toy(*PAIRS["random"](np.random.default_rng(5)))
    judgements = play(toy, {}, rule, k, rounds=30_000)
    longest = [j.emitted[:2] for j in judgements if len(j.emitted) >= 2]
    # Given that the first token was accepted, the second has the target's law after it.
    for first in range(V):
        after = [e[1:] for e in longest if e[0] == first]
        law = {key[1:]: p for key, p in chain_law_after(toy, first).items()}
        if len(after) > 500:
            assert_law(after, law)


def chain_law_after(toy, first):
    table = toy.target.exp().numpy()
    return {(first, second): table[first, second] for second in range(V)}


def test_rejection_law_is_exact():
    """Acceptance and residual as probabilities: their mixture is p to 1e-9."""
    rng = np.random.default_rng(0)
    for p, q in [
        (rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))),
        (np.array([0.9, 0.1, 0, 0, 0]), np.array([0.1, 0.9, 0, 0, 0])),
        (np.full(5, 0.2), np.full(5, 0.2)),
        (np.array([0.5, 0.5, 0, 0, 0]), np.array([0, 0, 0.5, 0.25, 0.25])),
        (np.array([0.3, 0.5, 0.2, 0, 0]), np.array([0, 1.0, 0, 0, 0])),
    ]:
        accept = np.minimum(1, np.divide(p, q, out=np.ones(5), where=q > 0))
        residual = np.clip(p - q, 0, None)
        mass = residual.sum()
        law = q * accept + (1 - (q * accept).sum()) * (residual / mass if mass else p)
        assert np.abs(law - p).max() < 1e-9
        assert_rejection_follows(p, q)


def assert_rejection_follows(p, q):
    """The function's acceptance rate per token equals min(1, p/q)."""
    n = 20_000
    rows = RowParams.of([SamplingParams(seed=s) for s in range(n)], [0] * n, CPU)
    target = Distribution(torch.arange(5).expand(n, 5), torch.tensor(p).expand(n, 5).float())
    draft = DraftProbs(torch.arange(5).expand(n, 5), torch.tensor(q).expand(n, 5).float())
    for token in np.flatnonzero(q):
        children = torch.full((n,), int(token))
        accepted, replacement = rejection(target, 5, rows, children, draft)
        wanted = min(1.0, p[token] / q[token])
        assert abs(float(accepted.float().mean()) - wanted) < 0.02
        residual = np.clip(p - q, 0, None)
        if residual.sum() > 0:
            share = np.bincount(replacement.numpy(), minlength=5) / n
            assert np.abs(share - residual / residual.sum()).max() < 0.02


def test_residual_without_mass_is_defined():
    """p == q leaves nothing to draw from; that must neither crash nor be reached."""
    p = torch.tensor([[0.25, 0.75, 0.0]])
    rows = RowParams.of([SamplingParams()], [0], CPU)
    accepted, token = rejection(
        Distribution(torch.arange(3)[None], p),
        3,
        rows,
        torch.tensor([1]),
        DraftProbs(torch.arange(3)[None], p),
    )
    assert bool(accepted[0])
    assert int(token[0]) in (0, 1)


def test_residual_and_draft_noise_are_not_shared():
    """Sharing them shifts the law: given a rejection, the draw must not know what was proposed."""
    n = 40_000
    p, q = torch.tensor([0.05, 0.35, 0.3, 0.3]), torch.full((4,), 0.25)
    rows = RowParams.of([SamplingParams(seed=s) for s in range(n)], [0] * n, CPU)
    support = torch.arange(4).expand(n, 4)
    proposed = race(Distribution(support, q.expand(n, 4)), rows, Purpose.DRAFT)
    target = Distribution(support, p.expand(n, 4))
    accepted, replacement = rejection(
        target, 4, rows, proposed, DraftProbs(support, q.expand(n, 4))
    )
    emitted = torch.where(accepted, proposed, replacement)
    share = torch.bincount(emitted, minlength=4) / n
    assert (share - p).abs().max() < 0.01


def test_a_full_acceptance_draws_the_bonus_from_p():
    table = random_table(np.random.default_rng(1), "random")
    toy = Toy(table, table)
    judgements = play(toy, {}, Rule.REJECTION, k=1, rounds=20_000)
    assert all(len(j.emitted) == 2 for j in judgements)
    assert_law([j.emitted for j in judgements], chain_law(toy, {}, 2))


def test_last_candidate_can_be_rejected():
    toy = Toy(*disjoint())
    for k in (1, 2, 3):
        judgements = play(toy, {}, Rule.REJECTION, k=k, rounds=200)
        assert all(j.path == () for j in judgements)
        assert {j.emitted[0] for j in judgements} <= {0, 1}


@pytest.mark.parametrize("rule", list(Rule))
def test_greedy_is_either_rule_at_temperature_zero(rule):
    toy = Toy([[0.3, 0.5, 0.2, 0.0001]] * V, [[0.6, 0.2, 0.2, 0.0001]] * V)
    for judgement in play(toy, {"temperature": 0}, rule, k=1, rounds=3):
        assert judgement.emitted == (1,)


def test_coupled_text_does_not_depend_on_the_proposal():
    target = random_table(np.random.default_rng(7), "random")
    drafts = [random_table(np.random.default_rng(s), "random") for s in (1, 2)]
    texts = [play(Toy(target, d), {}, Rule.COUPLED, k=2, rounds=500) for d in drafts]
    for one, two in zip(*texts, strict=True):
        shared = min(len(one.emitted), len(two.emitted))
        assert one.emitted[:shared] == two.emitted[:shared]


def test_coupled_acceptance_is_what_theory_says():
    """sum_x 1 / sum_y max(p_y/p_x, q_y/q_x) per token (Daliri, Musco, Suresh 2024)."""
    p, q = (np.random.default_rng(s).dirichlet(np.ones(V)) for s in (1, 2))
    expected = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(V))
    toy = Toy(np.tile(p, (V, 1)), np.tile(q, (V, 1)))
    accepted = [bool(j.path) for j in play(toy, {}, Rule.COUPLED, k=1, rounds=40_000)]
    assert np.mean(accepted) == pytest.approx(expected, abs=0.01)


def test_choices_of_one_seed_differ():
    logits = torch.zeros(3, 50)
    groups = [RowGroup(SamplingParams(seed=7, choice=c), Rule.COUPLED, 0) for c in range(3)]
    tokens = [j.emitted for j in judge(logits, groups, 50)]
    assert len(set(tokens)) == 3
    assert tokens == [j.emitted for j in judge(logits, groups, 50)]


WALKS = [
    # parents, tokens, row tokens, emitted
    ((), (), [9], (9,)),
    ((ROOT, 0), (1, 2), [1, 2, 3], (1, 2, 3)),
    ((ROOT, 0), (1, 2), [1, 5, 3], (1, 5)),
    ((ROOT, 0), (1, 2), [4, 2, 3], (4,)),
    ((ROOT, ROOT, 1), (1, 2, 3), [2, 0, 3, 7], (2, 3, 7)),  # the second child is right
    ((ROOT, ROOT, 0, 1), (1, 2, 5, 6), [2, 5, 6, 0, 8], (2, 6, 8)),
]


@pytest.mark.parametrize(("parents", "tokens", "rows", "emitted"), WALKS)
def test_walk_follows_the_rows_tokens(parents, tokens, rows, emitted):
    tree = TokenTree(tokens, parents)
    accepted = [rows[p + 1] == t for p, t in zip(parents, tokens, strict=True)]
    assert walk(tree, rows, accepted).emitted == emitted
