"""The acceptance benchmark: a run fills its table, and its arithmetic is what it says."""

import pytest
from acceptance import TEMPERATURES, Cell, measure_all, report
from pair import PairInfo

from specdec_ray import SpeculativeDecoder
from specdec_ray.speculation.proposal import Rule


def test_a_run_measures_every_rule_at_every_temperature(tiny_pair: PairInfo) -> None:
    with SpeculativeDecoder.from_pretrained(
        str(tiny_pair.target), str(tiny_pair.draft), dtype="float32", threads=1
    ) as decoder:
        cells = measure_all(decoder, seeds=2, tokens=16, k=3)
    assert set(cells) == {(rule, temperature) for rule in Rule for temperature in TEMPERATURES}
    for (_, temperature), cell in cells.items():
        assert len(cell.texts) == (16 if temperature else 8)
        assert 0 < cell.rate < 1
        # The prefill emits one of 16 tokens, and a round cut short is left out.
        assert all(12 <= sum(text) + len(text) <= 15 for text in cell.texts)
    assert cells[Rule.BLOCK, 0.0] == cells[Rule.COUPLED, 0.0]
    assert cells[Rule.BLOCK, 1.0] != cells[Rule.REJECTION, 1.0]
    text = report(cells)
    assert "typical (lossy)" in text
    assert "block against rejection, T = 1" in text


def test_the_arithmetic() -> None:
    cell = Cell(4, ((4, 2), (0, 2), (1, 3)))
    assert cell.rate == pytest.approx(12 / 24)
    assert cell.emitted == pytest.approx(3)
    # Texts are off by 2, -2 and 0 tokens; two rounds each, three texts.
    assert cell.error == pytest.approx(2 / 2 / 3**0.5)
