"""Plan to bytes, and bytes to a file, all or nothing.

The same plan always gives the same bytes: fields in the order of the schema (version and fingerprint first), mappings
sorted, no time, host or path. Each axis, unit, alternative and diagnostic stands on one line, so that a review of a
changed plan reads like a diff of decisions.
"""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from autoshard.errors import PlanFormatError, RequestError
from autoshard.plan.rules import violations
from autoshard.plan.schema import Plan

_FIRST = ("version", "fingerprint")
FIELD_ORDER = (*_FIRST, *(name for name in Plan.__struct_fields__ if name not in _FIRST))
"""Fields of a plan in the order of the file: what is applied, then what is for people."""

_ELSEWHERE = "name a file in a folder that exists and that you may write to"


def encode_plan(plan: Plan) -> bytes:
    """The bytes of a plan file.

    Raises:
        RequestError: it is no plan.
        PlanFormatError: the plan is not well formed, so that no loader would read it.
    """
    require_plan(plan)
    for where, reason in violations(plan):
        raise PlanFormatError(where, reason)
    tree = msgspec.to_builtins(plan)
    text = "{\n" + ",\n".join(f'  "{name}": {_layout(tree[name], 1)}' for name in FIELD_ORDER) + "\n}\n"
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PlanFormatError("$", f"a name is not Unicode text: {error.reason}") from error


def require_plan(plan: object) -> None:
    """Refuse what is no plan where a plan is to be written or shown.

    Raises:
        RequestError: it is none, or decisions alone, which lack all that is for people.
    """
    if not isinstance(plan, Plan):
        given = type(plan).__name__
        raise RequestError("plan", given, "a Plan", "give what make_plan or load_plan returned")


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file. Another reader sees the old file or the new one, never a part.

    Args:
        plan: the plan.
        path: the file; an existing one is replaced, a link is followed. Its folder must exist.

    Raises:
        RequestError: it is no plan, or the file cannot be written there. Nothing has been changed.
        PlanFormatError: the plan is not well formed.

    Examples:
        ``save_plan(plan, "plan.json")``, and back with ``load_plan("plan.json")``.
    """
    write_whole(path, encode_plan(plan))


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file. Another reader sees the old file or the new one, never a part.

    Args:
        path: the file; an existing one is replaced, a link is followed. Its folder must exist.
        data: what it is to hold.

    Raises:
        RequestError: the file cannot be written there. Nothing has been changed.
    """
    require_writable(path)
    try:
        _replace(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise _cannot_write(path, error) from error


def require_writable(path: str | os.PathLike[str]) -> None:
    """Refuse early what ``save_plan`` would refuse after all the work, as far as that can be told without writing.

    Raises:
        RequestError: the folder does not exist, or something that is not a regular file stands there.
    """
    if not isinstance(path, str | os.PathLike):
        raise RequestError("output", path, "the path of a file", "give text or a pathlib.Path")
    try:
        target = Path(os.path.realpath(path))
        has_folder = target.parent.is_dir()
        mode = target.stat().st_mode if target.exists() else stat.S_IFREG
    except (OSError, ValueError) as error:
        raise _cannot_write(path, error) from error
    if not has_folder:
        raise RequestError(
            "output", os.fspath(path), f"a file in a folder that exists; {target.parent} does not", _ELSEWHERE
        )
    if stat.S_ISDIR(mode):
        raise RequestError("output", os.fspath(path), "a file, and this is a folder", _ELSEWHERE)
    if not stat.S_ISREG(mode):
        raise RequestError("output", os.fspath(path), "a regular file, because it is replaced as a whole", _ELSEWHERE)


def _cannot_write(path: str | os.PathLike[str], error: OSError | ValueError) -> RequestError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return RequestError("output", os.fspath(path), f"a file that can be written ({reason})", _ELSEWHERE)


def _replace(target: Path, data: bytes) -> None:
    # In the same folder: only within one file system is a rename atomic. Opened by hand, because tempfile would
    # leave a file that only its owner can read.
    temporary = target.with_name(f".{target.name[:200]}.{os.urandom(6).hex()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _layout(value: Any, depth: int) -> str:
    if not value or not isinstance(value, dict | list | tuple):
        return _compact(value)
    indent = "  " * (depth + 1)
    lines = ",\n".join(indent + line for line in _lines(value, depth))
    brackets = "{}" if isinstance(value, dict) else "[]"
    return f"{brackets[0]}\n{lines}\n{'  ' * depth}{brackets[1]}"


def _lines(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, dict):
        # Fields of a struct keep the order of the schema; only mappings of free keys are sorted, in ``_compact`` too.
        for key, item in value.items():
            yield f"{_compact(key)}: {_layout(_sorted(key, item), depth + 1)}"
    else:
        for item in value:
            yield _compact({key: _sorted(key, part) for key, part in item.items()} if isinstance(item, dict) else item)


def _sorted(key: str, value: Any) -> Any:
    return dict(sorted(value.items())) if key in {"by_kind", "shard_dims"} else value


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
