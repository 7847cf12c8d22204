"""A dozen architectures of transformers, made small, train under their plans as one process trains them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_a_dozen_architectures_train_with_equal_losses(tmp_path: Path) -> None:
    out = tmp_path / "trained.jsonl"
    command = [sys.executable, "-m", "benchmarks.reach.train", "--dozen", "--jobs", "2", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["type"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == 12
    assert {row["outcome"] for row in rows.values()} == {"equal"}
    # Sharded by more than the root alone: blocks are units of their own.
    assert min(row["units"] for row in rows.values()) > 1
