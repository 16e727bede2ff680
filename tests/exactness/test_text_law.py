"""Texts written over many rounds have the target's own law, jointly, under every rule."""

import pytest
import torch

from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule

LOSSLESS = [rule for rule in Rule if rule.lossless]
SETTINGS = [
    SamplingParams(temperature=0.7),
    SamplingParams(top_p=0.8),
    SamplingParams(top_k=2),
    SamplingParams(min_p=0.3),
    SamplingParams(temperature=1.5, top_k=3, top_p=0.9, min_p=0.1),
]


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_million_texts(make_toy, write_texts, follows_law, rule):
    """Three tokens over several rounds: a round must not reuse noise that ended the one before."""
    toy = make_toy("random")
    texts = write_texts(toy, SamplingParams(), rule, k=2, n=1_000_000, length=3)
    assert follows_law(texts, toy.texts_law(SamplingParams(), 3), toy.vocab)


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("params", SETTINGS, ids=lambda p: f"{p.temperature}-{p.top_k}-{p.top_p}")
def test_joint_law_under_every_filter(make_toy, write_texts, follows_law, rule, params):
    toy = make_toy("random")
    texts = write_texts(toy, params, rule, k=2, n=60_000, length=3)
    assert follows_law(texts, toy.texts_law(params, 3), toy.vocab)


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize(
    "kind", ["random", "peaked", "equal", "one_hot_draft", "one_hot_target", "disjoint"]
)
def test_every_relation_of_draft_and_target(make_toy, write_texts, follows_law, rule, k, kind):
    toy = make_toy(kind, vocab=4, seed=11)
    texts = write_texts(toy, SamplingParams(), rule, k=k, n=30_000, length=2)
    assert follows_law(texts, toy.texts_law(SamplingParams(), 2), toy.vocab)


def test_coupled_texts_do_not_depend_on_the_draft(make_toy, write_texts):
    """Drafter invariance: any draft, any length, the very same text."""
    toy, other = make_toy("random"), make_toy("random", seed=4)
    other.target = toy.target
    texts = [
        write_texts(pair, SamplingParams(top_p=0.9), Rule.COUPLED, k=k, n=5_000, length=4)
        for pair, k in [(toy, 0), (toy, 3), (other, 2)]
    ]
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_greedy_texts_are_the_argmax(make_toy, write_texts):
    """At a temperature of nearly zero every lossless rule writes the argmax chain."""
    toy = make_toy("random")
    expected, token = [], 1
    for _ in range(4):
        token = int(toy.target[token].argmax())
        expected.append(token)
    for rule in LOSSLESS:
        params = SamplingParams(temperature=1e-40)
        texts = write_texts(toy, params, rule, k=2, n=50, length=4)
        assert texts.tolist() == [expected] * 50
