"""References to parameters that are kept beside the place where they are registered.

``fully_shard`` replaces the registered parameter and nothing else. A second reference (in a list, a dictionary, an
object, a ``functools.partial``, the closure of a function) stays what it was, the old whole tensor, which is never
trained and never freed. The same holds for another tensor on the memory of a parameter, such as ``weight.data``.

The walk starts at the attributes of each module and follows what they hold: containers, plain objects, functions. It
does not enter modules (they are walked as part of the tree), classes, and objects of torch and of the standard library.
"""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.capture.containers import PLAIN
from autoshard.capture.tree import ModuleTree, is_dtensor

MAX_DEPTH = 8
MAX_OBJECTS = 100_000
"""Objects that are looked at; a model that keeps more (a data set, say) is not followed further."""

_REGISTRIES = {"_parameters", "_modules", "_non_persistent_buffers_set", "training"}
_CLOSED = ("torch", "builtins", "collections", "functools", "threading", "logging", "weakref", "numpy", "_thread")
"""Packages whose objects are not looked into."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place whose content can be exchanged."""

    get: Callable[[], Any]
    put: Callable[[Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A reference to a parameter's memory outside the registered place.

    Attributes:
        key: of the parameter.
        place: where it is kept, from the root, such as ``layers.0.cache[1]``.
        tensor: what is kept.
        is_param: it is the parameter object itself, and not another tensor on its memory.
        slot: exchanges it; ``None`` where that cannot be done (a tuple, a ``functools.partial``).
    """

    key: str
    place: str
    tensor: torch.Tensor
    is_param: bool
    slot: Slot | None


def find_aliases(tree: ModuleTree) -> tuple[Alias, ...]:
    """Every alias that can be found, in the order of the tree."""
    walk = _Walk(tree)
    found: list[Alias] = []
    for fqn, entry in tree.modules.items():
        module = entry.module
        for name, value in vars(module).items():
            if name not in _REGISTRIES and type(value) not in PLAIN:
                place = f"{fqn}.{name}" if fqn else name
                found += walk.at(value, place, _item(vars(module), name), 0)
    return tuple(found)


class _Walk:
    """One walk over everything that the modules of a tree hold; each object is entered once."""

    def __init__(self, tree: ModuleTree) -> None:
        self._key_of = tree.key_of
        self._own: dict[int, str] = {}
        for key, entry in tree.params.items():
            address = _address(entry.param)
            if address is not None:
                self._own.setdefault(address, key)
        self._seen: dict[int, Any] = {}  # the objects stay alive, so that their ids stay theirs

    def at(self, value: Any, place: str, slot: Slot | None, depth: int) -> Iterator[Alias]:
        """Aliases in a value that is kept at a place."""
        if isinstance(value, torch.Tensor):
            yield from self._tensor(value, place, slot)
            return
        if isinstance(value, PLAIN) or depth > MAX_DEPTH or id(value) in self._seen or len(self._seen) > MAX_OBJECTS:
            return
        self._seen[id(value)] = value
        for part, name, inner in _parts(value):
            if type(part) not in PLAIN:
                yield from self.at(part, place + name, inner, depth + 1)

    def _tensor(self, tensor: torch.Tensor, place: str, slot: Slot | None) -> Iterator[Alias]:
        key = self._key_of.get(id(tensor))
        if key is not None:
            yield Alias(key=key, place=place, tensor=tensor, is_param=True, slot=slot)
            return
        address = _address(tensor)
        if address in self._own:
            yield Alias(key=self._own[address], place=place, tensor=tensor, is_param=False, slot=None)


def _address(tensor: torch.Tensor) -> int | None:
    """Identity of a tensor's memory; ``None`` where it has none of its own."""
    if is_dtensor(tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage()._cdata


def _parts(value: Any) -> Iterator[tuple[Any, str, Slot | None]]:
    """What an object holds: each part with its place below the object and its slot."""
    if isinstance(value, nn.Module | type | types.ModuleType):
        return
    if isinstance(value, Mapping):
        settable = value if isinstance(value, dict) else None
        for key, part in list(value.items()):
            yield part, f"[{key!r}]" if isinstance(key, str | int) else "[…]", _item(settable, key)
    elif isinstance(value, list | deque):
        for index, part in enumerate(list(value)):
            yield part, f"[{index}]", _item(value, index)
    elif isinstance(value, tuple | set | frozenset):
        for index, part in enumerate(value):
            yield part, f"[{index}]" if isinstance(value, tuple) else "[…]", None
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield part, ".partial", None
    elif isinstance(value, types.MethodType):
        yield value.__self__, ".__self__", None
        yield value.__func__, "", None
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif type(value).__module__.split(".")[0] not in _CLOSED:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            for name, part in list(attributes.items()):
                yield part, f".{name}", _item(attributes, name)
        for name in _slots(type(value)):
            if hasattr(value, name):
                yield (
                    getattr(value, name),
                    f".{name}",
                    Slot(functools.partial(getattr, value, name), functools.partial(setattr, value, name)),
                )


def _function_parts(function: types.FunctionType) -> Iterator[tuple[Any, str, Slot | None]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield (
                cell.cell_contents,
                f".{name}",
                Slot(
                    functools.partial(getattr, cell, "cell_contents"), functools.partial(setattr, cell, "cell_contents")
                ),
            )
        except ValueError:  # nothing is in it yet
            continue
    for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield part, ".default", None


def _slots(cls: type) -> tuple[str, ...]:
    found: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _item(container: Any, key: Any) -> Slot | None:
    if container is None:
        return None
    return Slot(functools.partial(container.__getitem__, key), functools.partial(container.__setitem__, key))
