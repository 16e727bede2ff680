import math

import pytest

from specdec_ray.errors import InvalidParameter
from specdec_ray.sampling.params import MAX_SEED, SamplingParams


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 100.1, 1e999]),
        ("top_k", [-1, 2**31]),
        ("top_p", [0.0, -0.0, -0.5, 1.1]),
        ("min_p", [-0.1, 1.5]),
        ("seed", [-1, 2**63]),
    ],
)
def test_values_outside_their_limits_are_named(field, values):
    for value in [*values, math.nan, math.inf, -math.inf]:
        with pytest.raises(InvalidParameter, match=field) as error:
            SamplingParams(**{field: value})
        assert error.value.field == field
        assert str(value) in str(error.value)


def test_a_choice_outside_its_limits_is_called_n():
    with pytest.raises(InvalidParameter, match="n: "):
        SamplingParams(choice=-1)


@pytest.mark.parametrize("params", [
    {"temperature": 0.0}, {"temperature": 100}, {"top_k": 2**31 - 1}, {"top_p": 1.0},
    {"top_p": 5e-324}, {"min_p": 1.0}, {"seed": MAX_SEED}, {"choice": 2**31 - 1},
])  # fmt: skip
def test_limits_themselves_are_valid(params):
    SamplingParams(**params)


def test_only_zero_is_greedy():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=-0.0).greedy
    assert not SamplingParams(temperature=5e-324).greedy
