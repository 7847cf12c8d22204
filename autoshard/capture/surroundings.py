"""What a model keeps outside its own attributes while a step is traced: put back, or named.

A cache that a step fills would hold fake tensors, which have no data, and the first real step would read them. The
model's own attributes are noted by ``FakeModel``. Noted here are

- the containers and plain objects in the namespaces of the Python modules in which the model's classes, and the
  functions and classes that these use, are defined (``CACHE = {}``; also a name that ``global`` binds anew);
- the attributes of plain objects that the model's modules hold;
- ``functools`` caches among them: one that was asked something new during the trace is emptied.

What holds a fake tensor after the trace gets back what it held before; everything else stays as the step left it. Fake
tensors that are still alive then are kept in a place that nobody can name beforehand (a closure, another library), and
``left_over`` says where.
"""

import functools
import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

MAX_DEPTH = 3
"""How deep containers and objects in each other are followed."""
NAMESPACE_DEPTH = 2
"""The files of the classes, and those of what these name."""
MAX_FOLLOWED = 1000
"""Parts of a container that are followed; larger ones hold data."""

_FOREIGN = frozenset({"torch", "autoshard", "numpy", "builtins", *sys.stdlib_module_names})
"""Packages whose namespaces are not the model's."""
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, set})
"""Subclasses of others may do anything when they are read: transformers' lazy mappings import what they name."""
_TORCH_OWN = frozenset(vars(nn.Module()))
_CACHE = type(functools.lru_cache(lambda: None))


class Surroundings:
    """What the code of some modules keeps outside them, noted to be put back.

    Args:
        modules: all modules of the model.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._caches: dict[int, tuple[Any, int]] = {}
        self._seen: set[int] = set()
        modules = list(modules)
        for namespace in _namespaces(modules):
            self._note(namespace, 0)
        for module in modules:
            for name, value in vars(module).items():
                if name not in _TORCH_OWN:
                    self._note(value, 1)

    def restore(self) -> None:
        """Put back what holds a fake tensor now, and empty the caches that were filled."""
        for cache, misses in self._caches.values():
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for container, contents in self._contents.values():
            if self._has_new_fake(container):
                _refill(container, contents)

    def _note(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > MAX_DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, _CACHE):
            self._caches[id(value)] = (value, value.cache_info().misses)
        elif type(value) in _CONTAINERS:
            self._contents[id(value)] = (value, value.copy())
            if len(value) <= MAX_FOLLOWED:
                for part in value.values() if isinstance(value, dict) else value:
                    self._note(part, depth + 1)
        elif isinstance(value, type):
            if not _is_foreign(value.__module__):
                for part in vars(value).values():
                    inner = getattr(part, "__func__", part)  # of a static or class method
                    if isinstance(inner, _CACHE) or type(inner) in _CONTAINERS:
                        self._note(inner, MAX_DEPTH)
        elif _is_plain(value):
            self._note(vars(value), depth)

    def _has_new_fake(self, container: Any) -> bool:
        """Something in it holds a fake tensor and is not noted itself."""
        parts = container.values() if isinstance(container, dict) else container
        if any(id(part) not in self._seen and _holds_fake(part) for part in parts):
            return True
        return isinstance(container, dict) and any(
            isinstance(key, FakeTensor | tuple) and _holds_fake(key) for key in container
        )


def _refill(container: Any, contents: Any) -> None:
    """The old contents; a namespace is in use meanwhile, so its names are put back one by one."""
    if isinstance(container, dict):
        for key in [key for key in container if key not in contents]:
            del container[key]
        container.update(contents)
    else:
        container.clear()
        container.extend(contents) if isinstance(container, list) else container.update(contents)


def left_over(mode: FakeTensorMode) -> tuple[str, ...]:
    """Names of the places that still hold fake tensors of a trace. Slow: every object of the process is looked at.

    Args:
        mode: of the trace.
    """
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), FakeTensor) and each.fake_mode is mode]
    places: dict[str, None] = {}
    for tensor in tensors:
        places.update(dict.fromkeys(_holders(tensor, MAX_DEPTH, {id(tensors)})))
    return tuple(sorted(places))


def _holders(value: Any, depth: int, ignored: set[int]) -> list[str]:
    """Names of what refers to a value, through containers."""
    found = []
    for holder in gc.get_referrers(value):
        if id(holder) in ignored or isinstance(holder, FakeTensor):
            continue
        name = _name(holder, value)
        if name:
            found.append(name)
        elif depth and isinstance(holder, dict | list | set | tuple):
            found += _holders(holder, depth - 1, {*ignored, id(holder)})
    return found


def _name(holder: Any, value: Any) -> str:
    if isinstance(holder, dict):
        module = sys.modules.get(holder.get("__name__", ""))
        if module is not None and vars(module) is holder:
            return next((f"{module.__name__}.{key}" for key, part in holder.items() if part is value), module.__name__)
        owners = [each for each in gc.get_referrers(holder) if getattr(each, "__dict__", None) is holder]
        return _attribute(owners[0], value) if owners else ""
    if isinstance(holder, CellType):
        return "a closure"
    if isinstance(holder, _CACHE) or type(holder).__name__ == "_lru_list_elem":
        return "a functools cache"
    return _attribute(holder, value) if hasattr(holder, "__dict__") and not isinstance(holder, type) else ""


def _attribute(owner: Any, value: Any) -> str:
    names = [name for name, part in vars(owner).items() if part is value]
    kind = type(owner)
    return f"{kind.__module__}.{kind.__qualname__}.{names[0]}" if names else ""


def _namespaces(modules: Iterable[nn.Module]) -> Iterator[dict[str, Any]]:
    """Namespaces of the modules in which classes are defined, then of what those use from elsewhere."""
    pending = dict.fromkeys(base.__module__ for kind in {type(m) for m in modules} for base in kind.__mro__)
    seen: set[str] = set()
    for _ in range(NAMESPACE_DEPTH):
        names, pending = pending, {}
        for name in names:
            module = sys.modules.get(name)
            if name in seen or _is_foreign(name) or not isinstance(module, ModuleType):
                continue
            seen.add(name)
            yield vars(module)
            for value in list(vars(module).values()):
                if isinstance(value, FunctionType | type | _CACHE):
                    pending[value.__module__] = None
                elif isinstance(value, ModuleType):
                    pending[value.__name__] = None


def _is_foreign(name: str | None) -> bool:
    return not name or name.partition(".")[0] in _FOREIGN


def _is_plain(value: Any) -> bool:
    """An object whose attributes are its own and the model's: no module, tensor, function or class of a library."""
    if isinstance(value, nn.Module | torch.Tensor | FunctionType | ModuleType):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not _is_foreign(type(value).__module__)


def _holds_fake(value: Any, depth: int = MAX_DEPTH) -> bool:
    if isinstance(value, FakeTensor):
        return True
    if not depth:
        return False
    if type(value) in _CONTAINERS and isinstance(value, dict):
        return any(_holds_fake(part, depth - 1) for part in (*value.values(), *value))
    if type(value) in _CONTAINERS or isinstance(value, tuple):
        return any(_holds_fake(part, depth - 1) for part in value)
    return _is_plain(value) and _holds_fake(vars(value), depth)
