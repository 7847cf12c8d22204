"""Tensors inside arguments and results, found exactly where FSDP2's hooks find them.

FSDP2 hangs its hooks on the tensors of nested dict, list, tuple, namedtuple and dataclass values and on nothing else;
what a module hides in an object of its own is invisible to it. The walk here takes the same containers in the same
order, so that the facts about inputs and outputs are the facts that FSDP2 acts on.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)
"""Values that hide no tensor."""
LEAVES = (torch.Tensor, *PLAIN)

MAX_DEPTH = 50


def visible_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` that FSDP2 finds, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for _, leaf in _leaves(value, "", 0) if isinstance(leaf, torch.Tensor)]


def opaque_part(value: Any) -> str:
    """Class name of the first part of ``value`` that may hide tensors from FSDP2, or ``""``."""
    if isinstance(value, LEAVES):
        return ""
    for _, leaf in _leaves(value, "", 0):
        if not isinstance(leaf, LEAVES):
            return type(leaf).__name__
    return ""


def kind_of(value: Any) -> str:
    """What a module's result is: the words of ``ModuleSpan.output_kind``."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if value is None:
        return "none"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclass"
    for kind in (dict, tuple, list):
        if isinstance(value, kind):
            return kind.__name__
    return "none" if isinstance(value, PLAIN) else f"opaque:{type(value).__name__}"


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in ``value``, each with its path below ``name``."""
    for path, leaf in _leaves(value, name, 0):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with each tensor in it replaced; containers are made anew, everything else is passed on.

    Dictionaries keep their class where it can be made from pairs; a container without tensors is handed back as it is.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, function) for part in value))
    if isinstance(value, list | tuple | set | frozenset):
        parts = [map_tensors(part, function) for part in value]
        return parts if isinstance(value, list) else type(value)(parts)
    if isinstance(value, dict) or (hasattr(value, "keys") and hasattr(value, "items")):
        return {key: map_tensors(part, function) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: map_tensors(getattr(value, f.name), function) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changes)
    return value


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise RecursionError(f"a value is nested more than {MAX_DEPTH} levels deep (does it contain itself?)")
    if isinstance(value, LEAVES):
        yield path, value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, part in zip(value._fields, value, strict=True):
            yield from _leaves(part, f"{path}.{name}", depth + 1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}", depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{path}[{index}]", depth + 1)
    else:
        yield path, value
