"""What a stage found, as stable text: ``autoshard plan --dump ir|analysis|space|timeline``.

One rule for all values: a field of plain values stands on one line, a field of records is a heading with one record
per line, and records that hold records are indented below their heading. Defaults are left out.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from autoshard.pipeline import PlanResult

DUMPS = ("ir", "analysis", "space", "timeline")


def format_dump(name: str, result: "PlanResult") -> str:
    """Text of one of the values from which a plan was made, without a line break at the end.

    Args:
        name: one of ``DUMPS``.
        result: the plan and what it was made from.
    """
    values: dict[str, Any] = {
        "ir": result.graph,
        "analysis": result.analysis,
        "space": result.analysis.space,
        "timeline": result.timeline,
    }
    return format_value(values[name])


def format_value(value: Any) -> str:
    """Text of a record: a frozen dataclass or a struct."""
    return "\n".join([type(value).__name__, *_body(value, "  ")])


def _body(record: Any, indent: str) -> Iterator[str]:
    for name, value in _fields(record):
        if _is_record(value):
            yield from _item(name, value, indent)
        elif isinstance(value, tuple | list) and any(map(_is_record, value)):
            yield f"{indent}{name} ({len(value)})"
            for item in value:
                yield from _item("", item, indent + "  ")
        elif isinstance(value, tuple | list) and any(isinstance(item, tuple) for item in value):
            yield f"{indent}{name} ({len(value)})"
            yield from (f"{indent}  {_plain(item)}" for item in value)
        else:
            yield f"{indent}{name}: {_plain(value)}"


def _item(name: str, value: Any, indent: str) -> Iterator[str]:
    heading = f"{name}: " if name else ""
    if not _is_record(value):
        yield f"{indent}{heading}{_plain(value)}"
    elif any(_holds_records(part) for _, part in _fields(value)):
        yield f"{indent}{heading}{type(value).__name__}"
        yield from _body(value, indent + "  ")
    else:
        yield f"{indent}{heading}{_plain(value)}"


def _plain(value: Any) -> str:
    if _is_record(value):
        return f"{type(value).__name__}({', '.join(f'{name}={_plain(part)}' for name, part in _fields(value))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_plain(key)}: {_plain(part)}" for key, part in sorted(value.items())) + "}"
    if isinstance(value, frozenset | set):
        return "{" + ", ".join(sorted(map(_plain, value))) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_plain, value)) + ")"
    return repr(value)


def _fields(record: Any) -> Iterator[tuple[str, Any]]:
    """Fields whose value is not their default."""
    if isinstance(record, msgspec.Struct):
        for field in msgspec.structs.fields(record):
            value = getattr(record, field.name)
            if field.required or value != field.default:
                yield field.name, value
    else:
        for part in dataclasses.fields(record):
            value = getattr(record, part.name)
            if part.default is dataclasses.MISSING or value != part.default:
                yield part.name, value


def _is_record(value: Any) -> bool:
    return isinstance(value, msgspec.Struct) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _holds_records(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(map(_is_record, value))
