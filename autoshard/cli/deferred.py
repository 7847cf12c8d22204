"""torch's compiler is imported when something of it is asked for, not whenever torch itself names it.

Fake tensors import its settings, kernels for meta tensors ask it to leave them alone, and transformers takes one class
of it; each would import the whole compiler with a computer algebra behind it: more than a second, for nothing that a
plan needs. Only commands that own their process do this, before torch is imported.
"""

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
ALONE = frozenset(f"{COMPILER}.{name}" for name in ("config", "_trace_wrapped_higher_order_op"))
"""Its submodules that import nothing else of it."""
BACKEND = "torch._inductor"
"""It and the compiler import each other, the compiler first."""


def defer_compiler() -> None:
    """From now on importing torch's compiler makes a module that is empty until something in it is asked for.

    Nothing happens where the compiler is imported already.
    """
    if COMPILER not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == COMPILER:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
            return spec
        if fullname != BACKEND and (not fullname.startswith(f"{COMPILER}.") or fullname in ALONE):
            return None
        compiler = sys.modules.get(COMPILER)
        if compiler is None:
            importlib.import_module(COMPILER)
            compiler = sys.modules[COMPILER]
        if isinstance(compiler, _Deferred):
            _run(compiler)
            found = sys.modules.get(fullname)
            if found is not None:  # importlib asks it for its spec, and would load it a second time
                found.__spec__ = importlib.machinery.ModuleSpec(fullname, _Loaded(found))
                return found.__spec__
        return None


class _Loaded(importlib.abc.Loader):
    """Hands out a module that came while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Loader(importlib.abc.Loader):
    """Makes the module and leaves its code for later."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None  # an ordinary one

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.real  # type: ignore[union-attr]
        vars(module).update(_deferred=(self.real, threading.RLock()), _left_alone=[], _marks=[], _stances=[])
        module.__class__ = _Deferred


class _Deferred(ModuleType):
    """A module whose code runs when a name is asked for that it does not have yet."""

    _deferred: tuple[Any, threading.RLock]
    _left_alone: list[Callable[..., Any]]
    _marks: list[tuple[str, Any]]
    _stances: "list[_Stance]"

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """A function that is not compiled: as it is, as long as there is no compiler.

        torch keeps the answer at its own functions (``torch._compile``); it is taken back when the compiler comes. What
        others have asked for stays as it is: while a step is looked at everything runs uncompiled.
        """
        if fn is None:
            return lambda function: function
        self._left_alone.append(fn)
        return fn

    def assume_constant_result(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function; the compiler hears of it when it comes."""
        self._marks.append(("assume_constant_result", fn))
        return fn

    def allow_in_graph(self, fn: Any) -> Any:
        """The function, or functions; the compiler hears of them when it comes."""
        self._marks.append(("allow_in_graph", fn))
        return fn

    def set_stance(self, *args: Any, **kwargs: Any) -> "_Stance":
        """How compiled functions are to run: taken when the compiler comes."""
        return _Stance(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        _run(self)
        return getattr(self, name)


class _Stance:
    """A stance of the compiler from its making on, or for the length of a ``with``."""

    def __init__(self, module: _Deferred, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        self._real: Any = None
        module._stances.append(self)

    def take(self) -> None:
        """The compiler is there."""
        self._real = self._module.set_stance(*self._args, **self._kwargs)

    def __call__(self, function: Any) -> Any:
        if self._real is None:
            _run(self._module)
        return self._real(function)

    def __enter__(self) -> None:
        if self._real is not None:
            self._real.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._real is not None:
            self._real.__exit__(*raised)
        else:
            self._module._stances.remove(self)


def _run(module: _Deferred) -> None:
    """Run the module's own code."""
    real, lock = module._deferred
    with lock:
        if type(module) is not _Deferred:
            return
        left_alone, marks, stances = module._left_alone, module._marks, module._stances
        del module._deferred, module._left_alone, module._marks, module._stances
        module.__class__ = ModuleType  # type: ignore[assignment]  # from here on its names are those that its code made
        for function in left_alone:
            getattr(function, "__dict__", {}).pop("__dynamo_disable", None)
        real.exec_module(module)
        for mark, function in marks:
            getattr(module, mark)(function)
        for stance in stances:
            stance.take()
