import itertools

import pytest
import torch
from scipy import stats

from specdec_ray.sampling import noise
from specdec_ray.sampling.noise import Purpose, exponential, row_keys, subkeys, uniform

GAMMA = -0x61C8864680B583EB  # SplitMix64's increment as int64


def keys(seed=0, choice=0, position=0, purpose=Purpose.COUPLED, rows=1):
    def column(value):
        return value if isinstance(value, torch.Tensor) else torch.full((rows,), value)

    return row_keys(column(seed), column(choice), column(position), purpose)


def test_splitmix64_reference():
    """The first outputs of SplitMix64 from state 0, as its authors' reference prints them."""
    zero = torch.zeros(1, dtype=torch.int64)
    unit = [float(uniform(zero + torch.tensor(n) * GAMMA)[0]) for n in range(3)]
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert unit == pytest.approx([((word >> 11) + 0.5) * 2.0**-53 for word in expected], rel=1e-15)


def test_a_token_s_noise_is_the_stream_s_output_number_token_id():
    own = keys(seed=9)
    ids = torch.tensor([0, 1, 2, 151_935])
    expected = [-torch.log1p(-uniform(own + token * GAMMA)) for token in ids]
    assert torch.equal(exponential(own, ids)[0], torch.cat(expected))


def test_arguments_stay_as_they_were():
    tensors = [torch.tensor([3]), torch.tensor([1]), torch.tensor([8]), torch.tensor([[5, 6]])]
    before = [t.clone() for t in tensors]
    own = row_keys(*tensors[:3], Purpose.DRAFT)
    kept = own.clone()
    exponential(own, tensors[3])
    uniform(own)
    assert all(torch.equal(a, b) for a, b in zip([*tensors, own], [*before, kept], strict=True))


def test_rows_may_share_their_token_ids():
    own = keys(seed=torch.arange(3), rows=3)
    ids = torch.tensor([4, 9, 1])
    assert torch.equal(exponential(own, ids), exponential(own, ids.expand(3, 3).contiguous()))


def test_no_word_gives_zero_or_infinity(monkeypatch):
    """The extreme hash words: all zeros and all ones."""
    monkeypatch.setattr(noise, "_mix_", lambda state: state)
    ends = torch.tensor([0, -1]) - GAMMA
    assert 0 < float(uniform(ends)[0]) < 1e-15
    assert 1 - 1e-15 < float(uniform(ends)[1]) < 1
    drawn = exponential(ends, torch.tensor([0]))
    assert torch.isfinite(drawn).all()
    assert float(drawn.min()) > 0


def test_laws():
    drawn = exponential(keys(position=torch.arange(2000), rows=2000), torch.arange(50))
    assert stats.kstest(drawn.flatten().numpy(), "expon").pvalue > 0.01
    assert float(drawn.mean()) == pytest.approx(1, abs=0.01)
    assert float(drawn.var()) == pytest.approx(1, abs=0.03)
    coins = uniform(keys(seed=torch.arange(50_000), purpose=Purpose.ACCEPT, rows=50_000))
    assert stats.kstest(coins.numpy(), "uniform").pvalue > 0.01


def test_substreams_are_independent():
    """Coins of two siblings at one position, and of one depth in two rounds."""
    own = keys(seed=torch.arange(20_000), purpose=Purpose.ACCEPT, rows=20_000)
    coins = uniform(subkeys(own[:, None], torch.arange(3)))
    assert coins.shape == (20_000, 3)
    pairs = [uniform(own), *coins.T]
    for first, second in itertools.combinations(pairs, 2):
        assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 0.03
        assert not (first == second).any()


def test_the_smallest_of_many_is_exponential_too():
    """min of V is Exp(V), and falls on every token alike: what decides is the lower tail."""
    vocab, rows = 1000, 4000
    smallest, token = exponential(
        keys(seed=torch.arange(rows), rows=rows), torch.arange(vocab)
    ).min(-1)
    assert stats.kstest(smallest.numpy() * vocab, "expon").pvalue > 0.01
    counts = torch.bincount(token // 100, minlength=10).numpy()
    assert stats.chisquare(counts).pvalue > 0.01


STREAMS = [
    ({"seed": 1}, {"seed": 2}),
    ({"seed": 1}, {"seed": 1 + 2**32}),
    ({"choice": 0}, {"choice": 1}),
    ({"position": 0}, {"position": 1}),
    ({"seed": 0, "choice": 1}, {"seed": 1, "choice": 0}),
    ({"seed": 1, "position": 0}, {"seed": 0, "position": 1}),
    ({"choice": 1, "position": 0}, {"choice": 0, "position": 1}),
    ({"choice": 1, "purpose": Purpose.COUPLED}, {"choice": 0, "purpose": Purpose.DRAFT}),
    *[({"purpose": a}, {"purpose": b}) for a, b in itertools.combinations(Purpose, 2)],
]


@pytest.mark.parametrize(("first", "second"), STREAMS, ids=str)
def test_streams_are_independent(first, second):
    ids = torch.arange(20_000)
    one, two = (exponential(keys(**key), ids)[0].numpy() for key in (first, second))
    for shift in (0, 1, 2):
        end = len(one) - shift
        assert abs(stats.pearsonr(one[shift:], two[:end]).statistic) < 0.03
        assert abs(stats.spearmanr(one[:end], two[shift:]).statistic) < 0.03


def test_neighbours_in_one_stream_are_independent():
    drawn = exponential(keys(position=torch.arange(200), rows=200), torch.arange(200)).numpy()
    for one, two in [
        (drawn[:, 1:], drawn[:, :-1]),  # tokens
        (drawn[1:], drawn[:-1]),  # positions
        (drawn[1:, :-1], drawn[:-1, 1:]),  # both
    ]:
        assert abs(stats.pearsonr(one.ravel(), two.ravel()).statistic) < 0.02


def test_keys_of_many_rows_are_all_different():
    grid = list(itertools.product(range(20), range(5), range(50), Purpose))
    seen = set()
    for purpose in Purpose:
        own = torch.tensor([(s, c, p) for s, c, p, u in grid if u is purpose])
        seen |= set(row_keys(*own.T, purpose).tolist())
    assert len(seen) == len(grid)


@pytest.mark.parametrize(
    ("seed", "choice", "position", "purpose", "key"),
    [
        (42, 1, 7, Purpose.COUPLED, -4722011763318198777),
        (2**63 - 1, 0, 0, Purpose.DRAFT, 8778403917609829865),
        (0, 0, 0, Purpose.ACCEPT, 1332736459288491693),
        (5, 3, 100_000, Purpose.RESIDUAL, -4935887601069087313),
    ],
)
def test_keys_are_fixed_for_ever(seed, choice, position, purpose, key):
    """A seed names a text: these numbers must never change."""
    assert keys(seed, choice, position, purpose).tolist() == [key]


def test_noise_is_fixed_for_ever():
    drawn = exponential(keys(seed=42, choice=1, position=7), torch.tensor([0, 1, 50_000]))
    expected = ["0x1.c2feffbaed941p-4", "0x1.e506bc6146bd5p+0", "0x1.c5807dd800c6ep-2"]
    assert drawn[0].tolist() == pytest.approx([float.fromhex(e) for e in expected], rel=1e-15)
    coin = uniform(keys(seed=42, choice=1, position=7, purpose=Purpose.ACCEPT))
    assert float(coin) == pytest.approx(0.33173538212428944, rel=1e-15)
