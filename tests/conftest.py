"""Golden files: what a test makes is compared with a committed text, or written in its place on demand."""

from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files; read the diff")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "golden: compares with a golden file; set by use of the fixture")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # First, so that `-m golden` finds the marks. Whoever uses the fixture is marked: nobody can forget it.
    for item in items:
        if "golden" in getattr(item, "fixturenames", ()):
            item.add_marker("golden")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's captured steps."""
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "captured-steps"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: the text must equal the file.

    A name is a path below ``tests/golden/``; one that begins with ``docs/`` or ``plans/`` is a path in the project.
    With ``--update-golden`` the file is written instead.
    """

    def compare(name: str, text: str) -> None:
        path = (ROOT if name.startswith(("docs/", "plans/")) else FOLDER) / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path.relative_to(ROOT)} is missing; write it with `make golden` and read it"
        assert text == path.read_text(encoding="utf-8"), f"{path.relative_to(ROOT)} differs; `make golden` rewrites it"

    return compare
