"""The files of the cache. Writers replace whole files, so that readers and other writers never meet half of one."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from autoshard.cache.entry import CachedStep, decode_step, encode_step

VARIABLE = "AUTOSHARD_CACHE_DIR"
SUFFIX = ".step"
MAX_FILES = 64
"""Steps that are kept; the one not used for longest goes first."""


def folder() -> Path:
    """Where captured steps are kept: ``$AUTOSHARD_CACHE_DIR``, or ``autoshard`` in the user's cache directory."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "autoshard"


def key_of(parts: Mapping[str, object]) -> str:
    """The name of a step, from everything that decides it and is known before."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:40]


def load(key: str) -> CachedStep | None:
    """The step of that name; ``None`` if there is none, or if its file is no step (it is then removed)."""
    path = folder() / f"{key}{SUFFIX}"
    try:
        data = path.read_bytes()
    except OSError:
        return None
    step = decode_step(data)
    with suppress(OSError):
        if step is None:
            path.unlink()
        else:
            os.utime(path)
    return step


def save(key: str, step: CachedStep) -> bool:
    """Keep a step; whether it was kept. A cache that cannot be written to is no error."""
    place = folder()
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place, prefix=key, suffix=".part")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encode_step(step))
        os.replace(name, place / f"{key}{SUFFIX}")
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        return False
    _make_room(place)
    return True


def clear() -> tuple[int, int]:
    """Remove all steps; how many files there were and how many bytes."""
    num_files = num_bytes = 0
    for path in _files(folder()):
        with suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            num_files, num_bytes = num_files + 1, num_bytes + size
    return num_files, num_bytes


def _files(place: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(path for path in place.iterdir() if path.suffix in (SUFFIX, ".part"))


def _make_room(place: Path) -> None:
    ages = []
    for path in _files(place):
        with suppress(OSError):
            if path.suffix == SUFFIX:
                ages.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(ages)[:-MAX_FILES]:
        with suppress(OSError):
            path.unlink()
