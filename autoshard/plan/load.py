"""Bytes to a plan, strictly.

A plan file is read as data only: nothing in it is executed, imported or opened. Whatever is wrong with it is a
``PlanFormatError`` that names the JSON path: text that is not JSON, unknown, missing, repeated or wrongly typed
fields, and values that no plan can have.
"""

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from autoshard.errors import Diagnostic, PlanFormatError, PlanVersionError, RequestError
from autoshard.plan.rules import MAX_INT, quote, violations
from autoshard.plan.schema import VERSION, Plan, Precision, Projection
from autoshard.plan.supported import require_supported
from autoshard.sizes import format_bytes

MAX_FILE_BYTES = 64 * 2**20
"""A plan of a hundred thousand units is a third of this; anything larger is not a plan."""

_PATH_IN_MESSAGE = re.compile(r"(?P<reason>.*?)(?: - at (?:`key` in )?`(?P<path>\$.*)`)?", re.DOTALL)


class _Bad:
    """Stands in the tree where the text held something that JSON readers disagree about."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file that ``apply_plan`` of this release can apply.

    Args:
        path: the file.

    Raises:
        RequestError: ``path`` is no path.
        PlanVersionError: the file has a version that this release cannot read.
        PlanFormatError: there is no such file, or it is not a plan, or it asks for what cannot be applied yet.

    Examples:
        >>> load_plan("no/such/plan.json")
        Traceback (most recent call last):
            ...
        autoshard.errors.PlanFormatError: no/such/plan.json: no such file
          remedy: name a file that `autoshard plan -o` or save_plan wrote
    """
    if not isinstance(path, str | os.PathLike):
        raise RequestError("path", path, "the path of a plan file", "give text or a pathlib.Path")
    source = os.fspath(path)
    try:
        data = _read(Path(path))
    except FileNotFoundError as error:
        raise PlanFormatError("", "no such file", source) from error
    except IsADirectoryError as error:
        raise PlanFormatError("", "is a folder, not a plan file", source) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PlanFormatError("", f"cannot be read: {reason}", source) from error
    if len(data) > MAX_FILE_BYTES:
        raise PlanFormatError("", f"is larger than {format_bytes(MAX_FILE_BYTES)}, which no plan is", source)
    plan = decode_plan(data, source)
    require_supported(plan, source)
    return plan


def _read(path: Path) -> bytes:
    """What the file holds, and one byte more than a plan may have; a shell's ``<(...)`` is a file as well.

    A named pipe to which nobody writes would be waited for without end.
    """
    if stat.S_ISFIFO(path.stat().st_mode) and Path(os.path.realpath(path)).exists():
        raise ValueError("it is a named pipe")
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def decode_plan(data: bytes, source: str = "") -> Plan:
    """A plan from the bytes of a plan file.

    Args:
        data: the bytes.
        source: where they came from, for messages.

    Raises:
        PlanVersionError: a version that this release cannot read.
        PlanFormatError: anything else that is wrong, with its JSON path.
    """
    tree = _parse(data, source)
    version = tree.get("version") if isinstance(tree, dict) else None
    if type(version) is int and version != VERSION:
        # First of all: what else a file of another version holds is not for this release to judge.
        raise PlanVersionError(version, (VERSION,), source)
    if isinstance(tree, dict) and "version" not in tree:
        raise PlanFormatError("$", "has no field `version`", source)
    bad = _first_bad(tree)
    if bad is not None:
        raise PlanFormatError(*bad, source)
    try:
        plan = msgspec.convert(tree, Plan, strict=True)
    except msgspec.ValidationError as error:
        found = _PATH_IN_MESSAGE.fullmatch(str(error))
        assert found is not None
        raise PlanFormatError(found["path"] or "$", _cut(found["reason"]), source) from error
    for where, reason in _missing(tree):
        raise PlanFormatError(where, reason, source)
    found_violations = list(violations(plan))
    if found_violations:
        where, reason = found_violations[0]
        more = f" (and {len(found_violations) - 1} more)" if len(found_violations) > 1 else ""
        raise PlanFormatError(where, reason + more, source)
    return plan


def _parse(data: bytes, source: str) -> Any:
    if len(data) > MAX_FILE_BYTES:
        raise PlanFormatError("$", f"is larger than {MAX_FILE_BYTES} bytes", source)
    if not data.strip():
        raise PlanFormatError("$", "is empty", source)
    if data.startswith(b"\xef\xbb\xbf"):
        raise PlanFormatError("$", "begins with a byte order mark; save it as UTF-8 without one", source)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanFormatError("$", f"is not UTF-8 text (byte {error.start})", source) from error
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer, parse_float=_number
        )
    except json.JSONDecodeError as error:
        raise PlanFormatError(
            "$", f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})", source
        ) from error
    except RecursionError as error:
        raise PlanFormatError("$", "is nested too deeply", source) from error


def _object(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    counts = Counter(key for key, _ in pairs)
    repeated = next(key for key in counts if counts[key] > 1)
    return _Bad(f"key {quote(repeated)} stands twice")


def _constant(text: str) -> _Bad:
    return _Bad(f"{text} is not a number of JSON")


def _integer(text: str) -> int | _Bad:
    # Length first: reading an endless run of digits takes quadratic time.
    if len(text) > 20 or abs(int(text)) > MAX_INT:
        return _Bad(f"the number {text[:24]}… is too large")
    return int(text)


def _number(text: str) -> float | _Bad:
    value = float(text)
    return value if math.isfinite(value) else _Bad(f"the number {text[:24]} is too large")


def _first_bad(tree: Any) -> tuple[str, str] | None:
    """Path and reason of the first bad value. Walks by hand: a tree may be deeper than the interpreter's stack."""
    keys: list[str | int] = []
    pending: list[Iterator[tuple[str | int, Any]]] = [iter([("$", tree)])]
    while pending:
        for key, value in pending[-1]:
            reason = _reason(key) or _reason(value)
            if reason:
                return _path([*keys, key]), reason
            if isinstance(value, dict | list):
                keys.append(key)
                pending.append(iter(value.items() if isinstance(value, dict) else enumerate(value)))
                break
        else:
            pending.pop()
            if keys:
                keys.pop()
    return None


def _reason(value: Any) -> str:
    if isinstance(value, _Bad):
        return value.reason
    if isinstance(value, str) and not value.isascii() and _has_surrogate(value):
        return f"{quote(value)} is not Unicode text"
    return ""


def _path(keys: list[str | int]) -> str:
    def step(key: str | int) -> str:
        is_plain = isinstance(key, str) and key.isidentifier() and len(key) < 60
        return f".{key}" if is_plain else f"[{quote(key)}]"

    return _cut("$" + "".join(step(key) for key in keys[1:]))


def _cut(text: str) -> str:
    return text if len(text) <= 400 else text[:300] + " … " + text[-80:]


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _missing(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields that have a default in Python and none in a file: a file says all that it means."""
    structs: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
        ("$", Plan, tree),
        ("$.precision", Precision, tree["precision"]),
        ("$.projection", Projection, tree["projection"]),
        *((f"$.diagnostics[{i}]", Diagnostic, item) for i, item in enumerate(tree["diagnostics"])),
    ]
    for path, struct, found in structs:
        for name in struct.__struct_fields__:
            if name not in found:
                yield path, f"has no field `{name}`"
