"""What ``autoshard calibrate`` refuses before it times anything, and how it tells what it fitted."""

from pathlib import Path
from typing import Any

import pytest

from autoshard.cli.calibrate import _told
from tests.hardware.test_calibrated import _profile


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("-o", "mine.json"), "torchrun --nproc-per-node 2"),
        (("-o", "mine.txt"), "ends in .json"),
        (("-o", "none/mine.json"), "does not"),
        (("-o", "mine.json", "--like", "v100"), "one of a100-40gb"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...], told: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = cli("calibrate", *arguments)
    assert done.code == 2
    assert told in done.err
    assert not list(tmp_path.iterdir())


def test_the_table_tells_each_fit_with_its_figure() -> None:
    text = _told(_profile(), "mine.json")
    lines = text.splitlines()
    assert lines[0].startswith("mine: 4 x one process on a test, gloo, torch 2.13.0; written to mine.json")
    matmul = next(line for line in lines if line.startswith("matmul float32"))
    assert "40 GFLOP/s" in matmul
    assert "0.0 %" in matmul
    scatter = next(line for line in lines if line.startswith("reduce-scatter over 4"))
    assert "50.0 µs + 30.0 µs a hop" in scatter
    assert "hooks of a unit in one direction: 70.0 µs" in text
