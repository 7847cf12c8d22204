"""``make bench-device`` on a machine without a device, and the part of it that a CPU can run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.device import step_lines

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device: the comparison itself would run")
def test_without_a_device_it_says_so_and_does_nothing() -> None:
    before = sorted((ROOT / "benchmarks").rglob("*.json"))
    command = [sys.executable, str(ROOT / "benchmarks" / "device.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "no CUDA device here: nothing was compared with a device\n"
    assert sorted((ROOT / "benchmarks").rglob("*.json")) == before


@pytest.mark.slow
@pytest.mark.parametrize("step", [("fp32", "adamw-for-loop"), ("bf16", "adamw-fused")])
def test_its_sharded_step_measures_what_is_projected(step: tuple[str, str]) -> None:
    (line,) = step_lines("cpu", (499, 128, 2, 61), (step,))
    assert line["num_units"] > 1
    assert set(line["projected_bytes"]) == {"forward", "backward", "optimizer"}
    assert line["projected_bytes"] == pytest.approx(line["measured_bytes"], rel=0.001)
