"""What a capture depends on is noticed: opened files, local modules, packages, and what cannot be seen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cache import Recorder, environment, is_unchanged, own_digest


def test_files_that_were_opened(tmp_path: Path) -> None:
    config, unread = tmp_path / "sizes.json", tmp_path / "other.json"
    for path in (config, unread):
        path.write_text("{}")
    with Recorder() as recorder:
        config.read_text()
        (tmp_path / "log.txt").write_text("written only")
    files = recorder.files()
    paths = [file.path for file in files]
    assert str(config) in paths
    assert str(unread) not in paths
    assert str(tmp_path / "log.txt") not in paths
    assert is_unchanged(files)
    unread.write_text("changed")
    assert is_unchanged(files)
    os.utime(config)  # the same content at another time is the same
    assert is_unchanged(files)
    config.write_text("{ }")
    assert not is_unchanged(files)
    config.write_text("{}")
    assert is_unchanged(files)
    config.unlink()
    assert not is_unchanged(files)


def test_local_modules_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_blocks_of_a_test.py").write_text("WIDTH = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_blocks_of_a_test  # type: ignore[import-not-found]

    assert my_blocks_of_a_test.WIDTH == 3
    with Recorder() as recorder:
        pass
    files = {file.path: file for file in recorder.files()}
    assert files[str(tmp_path / "my_blocks_of_a_test.py")].digest
    assert files[pytest.__file__].digest == ""
    assert not any("autoshard/cache" in path for path in files)
    monkeypatch.delitem(sys.modules, "my_blocks_of_a_test")


def test_what_cannot_be_seen_is_not_kept() -> None:
    with Recorder() as recorder:
        assert recorder.is_certain
        subprocess.run([sys.executable, "-c", ""], check=True)
    assert not recorder.is_certain
    with Recorder() as again:
        pass
    assert again.is_certain


def test_nothing_is_noted_outside(tmp_path: Path) -> None:
    path = tmp_path / "late.txt"
    path.write_text("")
    with Recorder() as recorder:
        pass
    path.read_text()
    assert str(path) not in recorder.opened


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment()
    monkeypatch.setenv("OLDPWD", "/somewhere/else")
    assert environment() == before
    monkeypatch.setenv("NUM_LAYERS", "3")
    assert environment() != before
    assert own_digest() == own_digest()
