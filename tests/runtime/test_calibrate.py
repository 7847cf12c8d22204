"""Two real ranks time this machine with tiny sizes; the profile that comes out loads and plans."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autoshard
from autoshard.hardware import load_profile
from autoshard.runtime.calibrate import QUICK, calibrate
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent


def _timed(rank: int, world: int) -> list[tuple[str, int, int, int]]:
    samples = calibrate(torch.device("cpu"), QUICK)
    return [(sample.figure, sample.work, sample.num_ranks, sample.ns) for sample in samples]


def test_all_ranks_have_the_same_timings_of_all_figures() -> None:
    first, second = run_ranks(_timed)
    assert first == second
    work: dict[str, set[int]] = {}
    for figure, amount, ranks, ns in first:
        work.setdefault(figure, set()).add(amount)
        assert ns > 0
        assert ranks == (2 if figure in ("all-gather", "reduce-scatter", "all-reduce") else 1)
    assert work["matmul float32"] == work["matmul bfloat16"] == {2 * 32**3, 2 * 256**3}
    assert work["memory"] == {3 * 65536, 3 * 2**22}
    # Half of the large buffer is sent, by an all-reduce twice.
    assert work["all-gather"] == work["reduce-scatter"] == {2048, 2**19, 2**22}
    assert work["all-reduce"] == {4096, 2**20, 2**23}
    assert work["units plain"] == work["units kept"] == work["units resharded"] == {1, 3}


def _torchrun(*arguments: str, folder: Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", "autoshard", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def test_the_command_writes_a_profile_that_plans(tmp_path: Path) -> None:
    done = _torchrun("calibrate", "-o", "mine.json", "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("mine: 2 x one process on ")
    profile = load_profile(str(tmp_path / "mine.json"))
    assert (profile.name, profile.overlap, profile.devices_per_node) == ("mine", "none", 2)
    assert profile.calibration is not None
    named = {fit.name for fit in profile.calibration.fits}
    assert {"all-gather over 2", "kernel", "matmul float32", "memory", "units resharded"} <= named
    assert json.loads((tmp_path / "mine.json").read_text())["calibration"]["backend"] == "gloo"
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    request = autoshard.Request(device=str(tmp_path / "mine.json"), devices=2)
    assert autoshard.make_plan(model, ((torch.ones(4, 8),), {}), request=request).provenance.device == "mine"
