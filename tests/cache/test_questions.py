"""A second question about a model: the same bytes, without torch; whatever changed is a miss."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MODEL = """
import json, os, pathlib
import torch
from torch import nn
from blocks_beside import WIDTH

DEPTH = json.loads((pathlib.Path(__file__).parent / "sizes.json").read_text())["depth"]


def build_model():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH + int(os.environ.get("MORE", "0")))))


def example_inputs(batch=None, seq=None):
    return (torch.zeros(batch or 2, WIDTH),), {}
"""

SCRIPT = """
import sys
from autoshard.cli import main
code = main(sys.argv[1:])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sizes.json").write_text('{"depth": 3}')
    (tmp_path / "blocks_beside.py").write_text("WIDTH = 4\n")
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "steps"))

    def run(*options: str) -> tuple[bytes, bool]:
        command = [sys.executable, "-c", SCRIPT, "plan", "model.py", "--device", "cpu", "--devices", "2", "--json"]
        done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout, done.stderr.decode().splitlines()[-1] == "True"

    return run


def test_a_second_question(ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, with_torch = ask()
    assert with_torch
    assert ask() == (first, False)
    assert ask("--no-cache") == (first, True)

    other, with_torch = ask("--memory", "1GiB")  # another budget is another question about the same step
    assert not with_torch
    assert other != first
    assert ask("--batch", "3")[1]

    (tmp_path / "blocks_beside.py").write_text("WIDTH = 5\n")
    changed, with_torch = ask()
    assert with_torch
    assert changed != first
    assert ask() == (changed, False)

    (tmp_path / "sizes.json").write_text('{"depth": 4}')
    assert ask()[1]
    monkeypatch.setenv("MORE", "1")
    assert ask()[1]


def test_what_is_not_kept(ask, tmp_path: Path) -> None:
    ask("--no-cache")
    ask("--frontend", "tree")
    assert not (tmp_path / "steps").exists()
