"""Files of the cache: whole or absent, whoever writes at the same time and whatever else lies there."""

import hashlib
import pickle
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from autoshard.cache import CachedStep, clear, folder, key_of, load, save
from autoshard.cache.entry import MAGIC, FileState, decode_step, encode_step
from autoshard.cache.store import MAX_FILES
from autoshard.errors import Diagnostic
from tests.random_graphs import random_graph


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "steps"))
    return tmp_path / "steps"


def step(seed: int = 0) -> CachedStep:
    noted = Diagnostic(code="AS102", severity="warning", where="(root)", message="m", remedy="r")
    graph = replace(random_graph(random.Random(seed)), diagnostics=(noted,))
    return CachedStep(graph=graph, assumed=("batch=1",), files=(FileState(path="/x", size=3, mtime_ns=5, digest=""),))


@pytest.mark.parametrize("seed", range(5))
def test_a_step_comes_back_as_it_was(seed: int) -> None:
    assert load("key") is None
    assert save("key", step(seed))
    assert load("key") == step(seed)
    assert load("other") is None


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert folder() == tmp_path / "steps"
    monkeypatch.delenv("AUTOSHARD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert folder() == tmp_path / "x" / "autoshard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder() == tmp_path / "home" / ".cache" / "autoshard"


WHOLE = encode_step(step())
BROKEN = {
    "empty": b"",
    "cut": WHOLE[:-1],
    "head only": WHOLE[:20],
    "one bit": WHOLE[:-9] + bytes([WHOLE[-9] ^ 1]) + WHOLE[-8:],
    "longer": WHOLE + b"\0",
    "another form": WHOLE.replace(b"step 1", b"step 2"),
    "a pickle": pickle.dumps({"graph": 1}),
    "text": b"hello",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_a_miss_and_goes(name: str, place: Path) -> None:
    assert decode_step(WHOLE) == step()
    place.mkdir()
    path = place / "key.step"
    path.write_bytes(BROKEN[name])
    assert load("key") is None
    assert not path.exists()


def test_right_bytes_of_another_meaning_are_a_miss() -> None:
    packed = zlib.compress(msgspec.msgpack.encode({"graph": {"frontend": "trace"}}))
    data = MAGIC + hashlib.blake2b(packed, digest_size=32).digest() + packed
    assert decode_step(data) is None


def test_writers_at_the_same_time(place: Path) -> None:
    """Eight writers and readers of two steps under one name: every read is one of the two, whole."""
    known = [step(1), step(2)]
    save("key", known[0])

    def work(number: int) -> bool:
        save("key", known[number % 2])
        return load("key") in known

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(48)))
    assert [path.name for path in place.iterdir()] == ["key.step"]


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert not save("key", step())
    assert load("key") is None
    assert clear() == (0, 0)


def test_old_steps_make_room(place: Path) -> None:
    for number in range(MAX_FILES + 3):
        save(f"key{number:03}", step())
    assert len(list(place.iterdir())) == MAX_FILES
    assert load(f"key{MAX_FILES + 2:03}") is not None


def test_clear_counts_what_it_removes(place: Path) -> None:
    save("one", step())
    save("two", step())
    (place / "notes.txt").write_text("not ours")
    assert clear() == (2, 2 * len(WHOLE))
    assert [path.name for path in place.iterdir()] == ["notes.txt"]


def test_keys_depend_on_every_part() -> None:
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert len({key_of({"a": 1}), key_of({"a": 2}), key_of({"b": 1}), key_of({"a": 1, "b": None})}) == 4
