"""What a captured step depends on beside what the user said: files and packages.

While a model is loaded, built and traced, Python's audit events tell which files are opened; the modules that were
imported are known afterwards. Files of installed packages are taken together: each package counts by its first file.
A capture that talks to the network or starts another program depends on what cannot be seen, and is not kept.
"""

import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from autoshard.cache.entry import FileState

MAX_HASHED = 64 << 20
"""Files up to this size are compared by content, larger ones by size and time."""

UNSEEN = {"socket.connect", "subprocess.Popen", "os.system", "os.posix_spawn"}
"""Events of which the outcome cannot be seen."""

UNIMPORTANT = {"_", "SHLVL", "PWD", "OLDPWD", "TERM", "COLUMNS", "LINES", "WINDOWID", "SSH_TTY", "SSH_CLIENT",
               "SSH_CONNECTION", "TERM_SESSION_ID", "PYTEST_CURRENT_TEST"}  # fmt: skip
"""Variables of the environment that no model is made of."""

_SYSTEM = ("/proc/", "/dev/", "/sys/", "/etc/")


class Recorder:
    """Context in which opened files are noted. Audit hooks stay for good, so there is one, and it is mostly asleep."""

    _active: "Recorder | None" = None
    _is_hooked = False

    def __init__(self) -> None:
        self.opened: dict[str, None] = {}
        self.is_certain = True

    def __enter__(self) -> "Recorder":
        if not Recorder._is_hooked:
            sys.addaudithook(_noted)
            Recorder._is_hooked = True
        Recorder._active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Recorder._active = None

    def files(self) -> tuple[FileState, ...]:
        """The state of everything that the capture depends on, as it is now."""
        installed, standard = _installed_folders(), _standard_folders()
        own = str(Path(__file__).parent.parent) + os.sep
        packages: dict[str, None] = {}
        local: dict[str, None] = {}
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if not path or path.startswith(own):
                continue
            if path.startswith(installed):
                if "." not in name:
                    packages[path] = None
            elif not path.startswith(standard):
                local[os.path.abspath(path)] = None
        for path in self.opened:
            if not path.startswith((*installed, *standard, *_SYSTEM, own)):
                local[path] = None
        found = [_state(path, is_hashed=True) for path in sorted(local)]
        found += [_state(path, is_hashed=False) for path in sorted(packages)]
        return tuple(state for state in found if state is not None)


def is_unchanged(files: Iterable[FileState]) -> bool:
    """Every file is as it was."""
    return all(_state(state.path, is_hashed=bool(state.digest)) == state for state in files)


def own_digest() -> str:
    """A digest of this package's own files, by size and time."""
    root = Path(__file__).parent.parent
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        info = path.stat()
        digest.update(f"{path.relative_to(root)} {info.st_size} {info.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """The variables of the environment on which a model may depend."""
    return {name: value for name, value in os.environ.items() if name not in UNIMPORTANT}


def _noted(event: str, args: tuple[Any, ...]) -> None:
    recorder = Recorder._active
    if recorder is None:
        return
    if event in UNSEEN:
        recorder.is_certain = False
    elif event == "open" and isinstance(args[0], str):
        path, flags = args[0], args[2]
        is_read = not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR)
        if is_read and not path.endswith((".pyc", ".pyo")):
            recorder.opened[os.path.abspath(path)] = None


def _state(path: str, *, is_hashed: bool) -> FileState | None:
    try:
        info = os.stat(path)
        if not os.path.isfile(path):
            return None
        if not is_hashed:
            return FileState(path=path, size=info.st_size, mtime_ns=info.st_mtime_ns, digest="")
        if info.st_size > MAX_HASHED:
            return FileState(path=path, size=info.st_size, mtime_ns=info.st_mtime_ns, digest="large")
        content = hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
        return FileState(path=path, size=info.st_size, mtime_ns=0, digest=content)
    except OSError:
        return None


def _installed_folders() -> tuple[str, ...]:
    names = ("purelib", "platlib")
    paths = {*site.getsitepackages(), site.getusersitepackages(), *(sysconfig.get_path(name) for name in names)}
    paths |= {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    return tuple(os.path.join(path, "") for path in sorted(paths))


def _standard_folders() -> tuple[str, ...]:
    return tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
