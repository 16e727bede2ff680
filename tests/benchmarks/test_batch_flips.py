"""The flip benchmark: a run fills its table, and what is no near tie never flips."""

import torch
from batch_flips import SHAPES, Flips, measure, report, write_texts
from pair import PairInfo

from specdec_ray.models.loading import load_model
from specdec_ray.models.packed_model import PackedModel


def test_a_run_measures_every_shape(tiny_pair: PairInfo) -> None:
    texts = write_texts(str(tiny_pair.target), threads=1, tokens=10)
    model = PackedModel(
        load_model(str(tiny_pair.target), dtype="float32", device="cpu"), block_count=len(texts)
    )
    found = measure(model, texts)
    assert model.pool.free_count == len(texts)
    assert set(found) == set(SHAPES)
    for flips in found.values():
        assert flips.contexts == 4 * len(texts)
        assert flips.flipped == 0
        assert flips.difference < 1e-3
    assert "float32, 8 sessions" in report({"float32": found})


def test_the_arithmetic() -> None:
    flips = Flips()
    alone = torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.75, 0.0]])
    flips.add(alone, torch.tensor([[1.0, 0.5, 0.0], [1.0, 1.5, 0.0]]))
    assert (flips.contexts, flips.flipped) == (2, 1)
    assert (flips.margin, flips.difference) == (0.25, 0.75)
