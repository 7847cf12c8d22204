"""The import table: who may import whom. Imports inside functions count too; type-only imports count as well."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "autoshard"

MAY_IMPORT = {
    "sizes": set(),
    "errors": {"sizes"},
    "findings": {"errors"},
    "hardware": {"errors", "sizes"},
    "request": {"errors", "sizes", "hardware"},
    "ir": {"errors"},
    "plan": {"errors", "sizes", "request"},
    "cache": {"ir"},
    "capture": {"errors", "ir", "request", "hardware", "plan"},
    "analysis": {"errors", "findings", "ir"},
    "verify": {"errors", "findings", "ir", "analysis", "plan", "request"},
    "cost": {"errors", "ir", "request", "hardware"},
    "simulate": {"errors", "sizes", "ir", "analysis", "cost", "plan", "request", "hardware"},
    "planner": {"errors", "sizes", "ir", "analysis", "cost", "simulate", "plan", "request", "hardware"},
    "runtime": {"errors", "findings", "sizes", "plan", "request", "hardware", "capture"},
    "report": {"errors", "sizes", "plan", "request", "simulate"},
    "integrations": {"errors", "plan", "runtime", "request", "capture"},
    "pipeline": {
        "errors", "sizes", "hardware", "request", "ir", "plan", "capture", "analysis", "verify", "cost", "simulate",
        "planner", "runtime",
    },
    "studies": {
        "errors", "sizes", "hardware", "request", "ir", "plan", "capture", "analysis", "verify", "simulate", "pipeline",
    },
}  # fmt: skip
"""Parts and what each may import beside itself. ``cli``, ``__init__`` and ``__main__`` may import everything."""

WITH_TORCH = {"capture", "runtime", "integrations"}
TORCH_FOR_TYPES = {"pipeline", "studies"}
NARROW = {("capture", "plan"): "autoshard.plan.fingerprint", ("report", "simulate"): "autoshard.simulate.timeline"}
"""Imports of which only one module is meant."""


def _sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def _part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(node.lineno, node.module or "")]
    return found


def _violations(path: Path) -> list[str]:
    part = _part(path)
    if part in {"cli", "__init__", "__main__"}:
        return []
    assert part in MAY_IMPORT, f"{path} stands in no part of the table"
    bad = []
    for line, module in _imports(path):
        place = f"{path.relative_to(ROOT)}:{line}: {module}"
        top, _, rest = module.partition(".")
        if top == "torch" and part not in WITH_TORCH | TORCH_FOR_TYPES:
            bad.append(f"{place}: torch is not for {part}")
        if top != "autoshard":
            continue
        target = rest.partition(".")[0]
        if target == part or not target:
            continue
        if target not in MAY_IMPORT[part]:
            bad.append(f"{place}: {part} may not import {target}")
        narrow = NARROW.get((part, target))
        if narrow is not None and not module.startswith(narrow):
            bad.append(f"{place}: {part} may import only {narrow} of {target}")
    return bad


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_table(path: Path) -> None:
    assert _violations(path) == []


def test_the_table_has_no_cycle() -> None:
    from graphlib import TopologicalSorter

    graph = {part: targets - {part} for part, targets in MAY_IMPORT.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MAY_IMPORT)


def test_a_forbidden_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    bad = tmp_path / "planner" / "x.py"
    bad.parent.mkdir()
    bad.write_text("def f():\n    import torch.nn\n    from autoshard.runtime import apply_plan\n")
    assert len(_violations(bad)) == 2


@pytest.mark.parametrize(
    "code",
    [
        "import autoshard; autoshard.load_plan, autoshard.Request, autoshard.format_plan",
        "import autoshard.cli",
        "import autoshard.verify.rules" if (ROOT / "verify" / "rules.py").exists() else "import autoshard.report",
    ],
)
def test_light_imports_load_neither_torch_nor_networkx(code: str) -> None:
    script = f"{code}\nimport sys\nprint([name for name in ('torch', 'networkx') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
