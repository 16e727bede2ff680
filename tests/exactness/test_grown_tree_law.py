"""Texts written with trees, as a draft grows them and a target judges them, keep the law."""

import itertools
from dataclasses import replace

import pytest
import torch

from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import Budget, DynamicShape, Growth, StaticShape
from specdec_ray.speculation.step import DrawRow, RowGroup, draw, judge

START, N, LENGTH = 1, 6_000, 3
SHAPES = {
    "wide": StaticShape.branching([3]),
    "wide, deep": StaticShape.branching([2, 2]),
    "uneven": StaticShape(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "more than there are": StaticShape.branching([6]),
    "dynamic": DynamicShape(width=2, depth=2, nodes=4),
}
RULES = [Rule.COUPLED, Rule.REJECTION]


def play_round(toy, texts, requests, rule, shape):
    """Grow and judge a tree behind each text; what each emits."""
    growths = [Growth(shape, Budget(64, 64)) for _ in texts]
    while any(growth.sprouts for growth in growths):
        rows, last = [], []
        for growth, text, params in zip(growths, texts, requests, strict=True):
            for sprout in growth.sprouts:
                path = growth.path(sprout.node)
                position = len(text) + len(path)
                rows.append(
                    DrawRow(
                        params,
                        rule,
                        position,
                        depth=len(path),
                        width=sprout.width,
                        scored=growth.pruned,
                    )
                )
                last.append([*text, *path][-1])
        drawn = iter(draw(toy.draft[last], rows, vocab_limit=toy.vocab))
        for growth in growths:
            growth.extend(list(itertools.islice(drawn, len(growth.sprouts))))
    groups, last = [], []
    for growth, text, params in zip(growths, texts, requests, strict=True):
        tree, probs = growth.proposal()
        groups.append(RowGroup(params, rule, len(text), tree, probs))
        last += [text[-1], *tree.tokens]
    judgements = judge(toy.target[last], groups, vocab_limit=toy.vocab)
    return [judgement.emitted for judgement in judgements]


def write(toy, params, rule, shape, n):
    texts = [[START] for _ in range(n)]
    requests = [replace(params, seed=seed) for seed in range(n)]
    while open_ := [i for i, text in enumerate(texts) if len(text) <= LENGTH]:
        emitted = play_round(
            toy, [texts[i] for i in open_], [requests[i] for i in open_], rule, shape
        )
        for i, tokens in zip(open_, emitted, strict=True):
            texts[i] += tokens
    return torch.tensor([text[1 : 1 + LENGTH] for text in texts])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SHAPES)
def test_trees_keep_the_law(make_toy, follows_law, name, rule):
    toy = make_toy("random")
    params = SamplingParams(temperature=0.8)
    texts = write(toy, params, rule, SHAPES[name], N)
    assert follows_law(texts, toy.texts_law(params, LENGTH), toy.vocab)


@pytest.mark.parametrize("params", [SamplingParams(top_k=2), SamplingParams(top_p=0.7)])
@pytest.mark.parametrize("kind", ["peaked", "one_hot_draft", "disjoint"])
@pytest.mark.parametrize("rule", RULES)
def test_trees_of_any_relation(make_toy, follows_law, rule, kind, params):
    toy = make_toy(kind, seed=11)
    texts = write(toy, params, rule, SHAPES["wide, deep"], 1_500)
    assert follows_law(texts, toy.texts_law(params, LENGTH), toy.vocab)


def test_coupled_texts_do_not_depend_on_the_tree(make_toy):
    toy = make_toy("random")
    params = SamplingParams(top_p=0.9)
    texts = [write(toy, params, Rule.COUPLED, shape, 300) for shape in SHAPES.values()]
    assert all(torch.equal(text, texts[0]) for text in texts)
