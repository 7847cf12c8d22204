"""The statistics that the benchmarks of plans print."""

import importlib
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def real() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("real")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("count", [15, 16, 25])
def test_the_interval_of_a_median_covers_it_in_95_of_100(real: Any, count: int) -> None:
    rng = random.Random(count)
    covered = 0
    for _ in range(2000):
        low, high = real.interval([rng.gauss(0, 1) for _ in range(count)])
        covered += low <= 0 <= high
    assert 0.94 <= covered / 2000 <= 0.99


def _way(name: str, predicted: float, seconds: list[float], projected: int = 10, measured: int = 10) -> dict[str, Any]:
    return {
        "names": [name],
        "predicted_s": predicted,
        "projected_bytes": projected,
        "measured_bytes": measured,
        "seconds": seconds,
    }


RESULT = {
    "model": "m",
    "allowances": {"ample": 100, "tight": 12},
    "ways": [
        _way("autoshard, ample", 1.0, [1.0] * 15, projected=90, measured=102),
        _way("autoshard, tight", 1.2, [1.25] * 15, measured=12),
        _way("root only", 1.05, [1.1] * 15, projected=95),
        _way("blocks", 1.5, [1.2] * 15),
    ],
}


def test_pairs_are_those_that_differ_by_more_than_a_tenth(real: Any) -> None:
    found = {(fast, slow): measured > 1 for fast, slow, _, measured in real.pairs(RESULT, "seconds")}
    assert found == {
        ("autoshard, ample", "autoshard, tight"): True,
        ("autoshard, ample", "blocks"): True,
        ("root only", "autoshard, tight"): True,
        ("root only", "blocks"): True,
        ("autoshard, tight", "blocks"): False,
    }


def test_ours_is_held_against_the_fastest_baseline_that_fits(real: Any) -> None:
    ample, tight = real.cells(RESULT, "seconds")
    assert (ample.baseline, tight.baseline) == ("root only", "blocks")
    assert math.isclose(ample.ratio, 1 / 1.1)
    assert math.isclose(tight.ratio, 1.25 / 1.2)
    assert math.isclose(tight.predicted, 1.2 / 1.5)
    assert math.isclose(ample.over, 0.02)
    assert tight.over == 0
