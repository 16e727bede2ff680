import pytest
import torch
from scipy import stats

from specdec_ray.sampling.noise import Purpose, exponential, row_keys, uniform

GAMMA = -0x61C8864680B583EB  # SplitMix64's increment as int64


def keys(seed=0, choice=0, position=0, purpose=Purpose.COUPLED, rows=1):
    def column(value):
        return value if isinstance(value, torch.Tensor) else torch.full((rows,), value)

    return row_keys(column(seed), column(choice), column(position), purpose)


def test_bits_are_fixed_for_ever():
    """A seed names a text: these numbers must never change."""
    noise = exponential(keys(seed=42, choice=1, position=7), torch.tensor([0, 1, 50_000]))
    assert noise[0].tolist() == pytest.approx(
        [1.6593236905960593, 0.7300947439133091, 0.09494194577824949], rel=1e-15
    )


def test_splitmix64_reference():
    """The first outputs of SplitMix64 from state 0, as its authors' reference prints them."""
    zero = torch.zeros(1, dtype=torch.int64)
    unit = [float(uniform(zero + torch.tensor(n) * GAMMA)[0]) for n in range(3)]
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert unit == [((word >> 11) + 0.5) * 2.0**-53 for word in expected]


def test_exponential_law():
    noise = exponential(keys(position=torch.arange(2000), rows=2000), torch.arange(50))
    assert stats.kstest(noise.flatten().numpy(), "expon").pvalue > 0.01
    assert float(noise.min()) > 0
    assert torch.isfinite(noise).all()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"seed": 1}, {"seed": 2}),
        ({"choice": 0}, {"choice": 1}),
        ({"position": 0}, {"position": 1}),
        ({"purpose": Purpose.COUPLED}, {"purpose": Purpose.RESIDUAL}),
        ({"purpose": Purpose.DRAFT}, {"purpose": Purpose.ACCEPT}),
        ({"choice": 1, "purpose": Purpose.COUPLED}, {"choice": 0, "purpose": Purpose.DRAFT}),
        ({"seed": 1, "position": 0}, {"seed": 0, "position": 1}),
    ],
)
def test_streams_are_independent(first, second):
    ids = torch.arange(20_000)
    one, two = (exponential(keys(**key), ids)[0].numpy() for key in (first, second))
    assert abs(stats.pearsonr(one, two).statistic) < 0.03
    assert abs(stats.pearsonr(one[1:], two[:-1]).statistic) < 0.03


def test_no_token_of_a_large_vocabulary_wins_by_coarse_noise():
    """With 24 random bits about 0.9% of positions draw a tail token of a 152k vocabulary."""
    vocab, rows = 152_000, 300
    probs = torch.full((vocab,), 1e-12, dtype=torch.float64)
    probs[0] = 1 - 1e-12 * (vocab - 1)
    noise = exponential(keys(position=torch.arange(rows), rows=rows), torch.arange(vocab))
    assert (probs / noise).argmax(-1).tolist() == [0] * rows
