import math

import pytest

from specdec_ray.errors import InvalidParameter
from specdec_ray.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 101),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_values_outside_their_limits_are_named(field, value):
    with pytest.raises(InvalidParameter, match=field) as error:
        SamplingParams(**{field: value})
    assert error.value.field == field
    assert str(value) in str(error.value)


def test_negative_zero_is_greedy():
    assert SamplingParams(temperature=-0.0).greedy
