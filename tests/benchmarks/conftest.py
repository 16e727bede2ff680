"""The benchmarks are scripts beside each other, not a package: their folder goes on the path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from pair import PairInfo, Size, make_pair


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> PairInfo:
    sizes = {"target": Size(256, 3), "draft": Size(128, 1), "vocab": 512}
    return make_pair(tmp_path_factory.mktemp("pairs"), agreement=0.7, **sizes)
