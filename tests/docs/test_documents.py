"""The documents hold: their Python runs, their commands run, their links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXPECTED_EXIT = {"autoshard plan model.py --device cpu --devices 2 --memory 1MiB": 3}


def _blocks(document: Path) -> list[tuple[str, str]]:
    """Python blocks (``python``, text) and indented commands (``command``, text) in order."""
    text = document.read_text()
    found = [(m.start(), "python", m[1]) for m in re.finditer(r"```python\n(.*?)```", text, re.S)]
    found += [(m.start(), "command", m[1]) for m in re.finditer(r"^    ((?:autoshard|torchrun) .*)$", text, re.M)]
    return [(kind, body) for _, kind, body in sorted(found)]


def _run(command: list[str], folder: Path, expected: int) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == expected, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def _command(text: str) -> list[str]:
    words = text.split("#")[0].split()
    module = {"autoshard": "autoshard", "torchrun": "torch.distributed.run"}[words[0]]
    return [sys.executable, "-W", "ignore", "-m", module, *words[1:]]


@pytest.mark.slow
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    blocks = _blocks(ROOT / "docs" / "tutorial" / "first-plan.md")
    for kind, body in blocks:
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", body)
            assert name is not None, "each block of the tutorial names its file"
            (tmp_path / name[1]).write_text(body)
        else:
            _run(_command(body), tmp_path, EXPECTED_EXIT.get(body, 0))
    assert len(blocks) == 7


@pytest.mark.slow
def test_the_readme_runs_as_written(tmp_path: Path) -> None:
    blocks = _blocks(ROOT / "README.md")
    python = [body for kind, body in blocks if kind == "python"]
    (tmp_path / "model.py").write_text(python[0])
    planned = next(body for kind, body in blocks if kind == "command" and "256MiB" in body)
    _run(_command(planned), tmp_path, 0)
    (tmp_path / "plan_in_code.py").write_text(python[1])
    _run([sys.executable, "-W", "ignore", "plan_in_code.py"], tmp_path, 0)
    begin = "import torch, torch.distributed as dist\nimport autoshard\nfrom model import build_model\n"
    begin += "dist.init_process_group('gloo')\n"
    (tmp_path / "train.py").write_text(begin + python[2] + "dist.destroy_process_group()\n")
    _run(_command("torchrun --nproc-per-node 2 train.py"), tmp_path, 0)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    prose = re.sub(r"```.*?```|^ {4}.*$|`[^`\n]*`", "", document.read_text(), flags=re.S | re.M)
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose)
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


def test_every_folder_of_docs_has_a_page() -> None:
    empty = [folder for folder in (ROOT / "docs").iterdir() if folder.is_dir() and not list(folder.glob("*.md"))]
    assert empty == []
