"""The single-stream benchmark: its check can fail, and its arithmetic is the formula's."""

from collections.abc import Iterator, Sequence

import pytest
from pair import PairInfo
from single_stream import Contenders, Measurements, Text, check_texts, measure, report


@pytest.fixture
def contenders(tiny_pair: PairInfo) -> Iterator[Contenders]:
    with Contenders(
        str(tiny_pair.target), str(tiny_pair.draft), "float32", k=3, threads=1
    ) as contenders:
        yield contenders


def test_all_three_write_the_same_texts(contenders: Contenders) -> None:
    check_texts(contenders, 24)


def test_a_wrong_token_fails_the_benchmark(
    contenders: Contenders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(prompt: Sequence[int], count: int) -> Text:
        text = contenders.plain(prompt, count)
        return Text((*text.tokens[:5], text.tokens[5] + 1, *text.tokens[6:]), text.seconds)

    monkeypatch.setitem(contenders.ways, "specdec_ray", lying)
    with pytest.raises(SystemExit, match=r"specdec_ray differs .* at token 5"):
        check_texts(contenders, 24)


def test_a_short_text_fails_the_benchmark(
    contenders: Contenders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(contenders.ways, "assisted", lambda ids, n: contenders.plain(ids, n - 1))
    with pytest.raises(SystemExit, match=r"assisted differs .* at token 23"):
        check_texts(contenders, 24)


def test_a_run_measures_everything(contenders: Contenders) -> None:
    seen = measure(contenders, rounds=2, count=16)
    assert {name: len(rates) for name, rates in seen.rates.items()} == {
        "generate": 2,
        "assisted": 2,
        "specdec_ray": 2,
    }
    assert set(seen.equal.values()) == {2}
    assert len(seen.draft_s) == len(seen.target_s) == len(seen.verify_s) > 0
    # Prefill emits one token; every round emits what it accepted and the target's own.
    assert sum(seen.accepted) + len(seen.accepted) == 2 * 15
    assert "same text as generate" in report(seen, k=3)


def test_the_limit() -> None:
    seen = Measurements(
        rates={"generate": [10.0, 20.0], "specdec_ray": [30.0, 50.0]},
        accepted=[5, 2, 0, 3],
        draft_s=[0.1],
        target_s=[1.0],
    )
    assert seen.mean_emitted == 3.5
    assert seen.limit(k=4) == pytest.approx(3.5 / 1.4)
    assert seen.speedup("specdec_ray", "generate") == [3.0, 2.5]
