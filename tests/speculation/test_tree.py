import pytest

from specdec_ray.errors import InvalidParameter
from specdec_ray.speculation.tree import ROOT, TokenTree


def test_chain_is_a_tree():
    tree = TokenTree.chain((5, 6, 7))
    assert tree.parents == (ROOT, 0, 1)
    assert tree.depths == (1, 2, 3)
    assert tree.is_chain
    assert len(tree) == 3


def test_depth_follows_parents():
    tree = TokenTree((1, 2, 3, 4, 5), (ROOT, ROOT, 0, 2, 1))
    assert tree.depths == (1, 1, 2, 3, 2)
    assert not tree.is_chain


@pytest.mark.parametrize("parents", [(0,), (ROOT, 1), (-2,), (ROOT,) * 3])
def test_impossible_parents_are_refused(parents):
    with pytest.raises(InvalidParameter, match="parents"):
        TokenTree((1, 2)[: max(len(parents), 1)] if len(parents) < 3 else (1, 2), parents)
