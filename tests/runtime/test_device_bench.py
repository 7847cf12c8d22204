"""``make bench-device`` on a machine without a device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
