"""The Python of the how-tos about comparing and fitting runs as written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent


def _python(page: str) -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)[0]


def _run(code: str, folder: Path) -> str:
    (folder / "model.py").write_text(_python("README.md"))
    (folder / "main.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "main.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_compare(tmp_path: Path) -> None:
    lines = _run(_python("docs/how-to/compare.md"), tmp_path).splitlines()
    assert [line.split()[:2] for line in lines] == [["autoshard", "fits"], ["today", "fits"]]
    ours, theirs = (int(line.split()[2]) for line in lines)
    assert ours > 0
    assert theirs > 0


def test_fit(tmp_path: Path) -> None:
    begin = "from model import build_model, example_inputs\nmodel = build_model()\n"
    lines = _run(begin + _python("docs/how-to/fit.md"), tmp_path).splitlines()
    assert lines[0] == "1"
    assert [line.split()[:2] for line in lines[1:]] == [["8", "1"], ["16", "1"], ["8", "4"], ["16", "4"]]
