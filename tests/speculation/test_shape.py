"""Shapes of token trees and how trees grow into them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_ray.errors import InvalidParameter
from specdec_ray.speculation.proposal import DraftProbs
from specdec_ray.speculation.shape import Budget, DynamicShape, Growth, StaticShape
from specdec_ray.speculation.step import Drawn
from specdec_ray.speculation.tree import ROOT, TokenTree

WIDE = Budget(64, 64)


def grow(shape, budget, draw):
    """Grow to the end; `draw(path, width)` gives the children of the node at the path."""
    growth = Growth(shape, budget)
    while growth.sprouts:
        growth.extend([draw(growth.path(s.node), s.width) for s in growth.sprouts])
    return growth


def numbered(path, width):
    return Drawn(tuple(10 * len(path) + rank for rank in range(width)))


def test_a_chain_and_a_branching():
    assert grow(StaticShape.chain(3), WIDE, numbered).proposal()[0] == TokenTree.chain((0, 10, 20))
    tree, _ = grow(StaticShape.branching([2, 1]), WIDE, numbered).proposal()
    assert tree == TokenTree((0, 1, 10, 10), (ROOT, ROOT, 0, 1))


def test_medusas_own_notation():
    choices = ((0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0))
    shape = StaticShape(choices)
    assert (shape.nodes, shape.depth, shape.scratch) == (6, 3, 3)
    tree, _ = grow(shape, WIDE, numbered).proposal()
    assert set(tree.paths) == {(0,), (1,), (0, 10), (0, 11), (1, 10), (0, 10, 20)}


@pytest.mark.parametrize(
    "choices", [((1,),), ((0, 0),), ((0,), (0,)), ((0,), ()), ((0,), (0, 1)), ((-1,),)]
)
def test_what_no_tree_can_have_is_refused(choices):
    with pytest.raises(InvalidParameter, match="choices"):
        StaticShape(choices)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 64), st.integers(1, 4))
def test_a_cut_shape_is_a_shape_within_the_budget(widths, nodes, depth):
    shape = StaticShape.branching(widths)
    cut = shape.within(Budget(nodes, depth))
    assert set(cut.choices) <= set(shape.choices)
    assert cut.depth <= depth
    allowed = sum(len(ranks) <= depth for ranks in shape.choices)
    assert cut.nodes == min(nodes, allowed)
    assert cut.nodes - cut.depth <= shape.scratch


def test_no_budget_grows_nothing():
    for budget in (Budget(0, 5), Budget(5, 0)):
        growth = Growth(StaticShape.chain(4), budget)
        assert not growth.sprouts
        assert growth.proposal() == (TokenTree(), None)


def test_a_node_with_fewer_children_than_wanted():
    growth = grow(StaticShape.branching([3, 2]), WIDE, lambda path, width: numbered(path, 1))
    tree, _ = growth.proposal()
    assert tree == TokenTree.chain((0, 10))


def test_the_law_of_each_node_is_its_parents():
    def draw(path, width):
        law = DraftProbs(torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]]) + len(path))
        return Drawn(numbered(path, width).tokens, probs=law)

    _, probs = grow(StaticShape.branching([2, 1]), WIDE, draw).proposal()
    assert probs.probs[:, 0].tolist() == [0.5, 0.5, 1.5, 1.5]


SCORES = {(): [-0.1, -3.0], (0,): [-0.2, -2.0], (1,): [-0.1, -0.1], (0, 10): [-0.3, -1.5]}


def scored(path, width):
    scores = SCORES.get(path, [-0.4, -4.0])
    return Drawn(numbered(path, width).tokens, tuple(scores[:width]))


def test_a_dynamic_tree_holds_the_most_probable_nodes():
    tree, _ = grow(DynamicShape(width=2, depth=3, nodes=4), WIDE, scored).proposal()
    # -0.1, -0.3, -0.6, then -1.8 of (0, 10, 21) before -2.1 of (0, 11) and -3 of (1,).
    assert set(tree.paths) == {(0,), (0, 10), (0, 10, 20), (0, 10, 21)}


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.randoms())
def test_dynamic_trees_keep_to_their_bounds(width, depth, nodes, rng):
    def draw(path, width):
        scores = sorted((-rng.random() for _ in range(width)), reverse=True)
        return Drawn(tuple(range(width)), tuple(scores))

    shape = DynamicShape(width, depth, nodes)
    growth = grow(shape, WIDE, draw)
    tree, _ = growth.proposal()
    assert len(tree) == min(nodes, len(growth.tokens))
    assert max(tree.depths) <= depth
    inner = set(growth.parents) - {ROOT}
    assert 1 + len(inner) <= 1 + shape.scratch + shape.depth
