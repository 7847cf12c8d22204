"""Code that asks for the exact class of a module: ``type(m) is Block``, a table by class, ``m.__class__ == Block``.

``fully_shard`` gives each unit a class of its own, derived from the module's and of its name. ``isinstance``, names and
attributes of the class do not notice, a question for the very class does. Whether the code that a forward reaches
may ask so is read off its bytecode; if it may, the forward is run on fake tensors as it is and once more with every
class exchanged as ``fully_shard`` does it, and the ops of both are compared.
"""

import dis
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoshard.capture.answers import Answers
from autoshard.capture.inputs import Pair
from autoshard.capture.probe import LEAST_OPS, LONGEST, run_forward
from autoshard.capture.tree import ModuleTree

TRAIT = "exact-type"
MAX_FUNCTIONS = 5000
"""Functions whose code is read."""

_OWN = {"__bases__", "__base__", "__dict__", "__mro__", "mro"}
"""Attributes that a derived class does not answer as its base does."""
_AHEAD = 8
"""Instructions between the name ``type`` and its call that are looked at."""


def exact_types(
    model: nn.Module,
    tree: ModuleTree,
    pair: Pair,
    num_ops: int,
    *,
    entry: str,
    dtype: torch.dtype | None,
    device_kind: str,
) -> frozenset[str]:
    """FQNs of the modules whose class, if exchanged, changes what the forward does.

    Args:
        model: the root.
        tree: its tree.
        pair: arguments of the entry.
        num_ops: ops of its forward.
        entry: the root's method to run.
        dtype: dtype of floating point parameters and inputs.
        device_kind: ``cuda`` or ``cpu``.
    """
    if not may_ask(tree, entry):
        return frozenset()
    budget = max(LEAST_OPS, LONGEST * num_ops)

    def digest(modules: Sequence[nn.Module]) -> str:
        with _exchanged(modules):
            way = run_forward(
                model,
                tree,
                pair,
                Answers(),
                budget,
                entry=entry,
                dtype=dtype,
                device_kind=device_kind,
                replaces_draws=False,
            )
        return "failed" if way is None else way.digest

    by_class: dict[type, list[str]] = {}
    for fqn, module in tree.modules.items():
        if not isinstance(module.module, torch.jit.ScriptModule):
            by_class.setdefault(type(module.module), []).append(fqn)
    usual = digest(())
    if digest([tree.module(fqn) for fqns in by_class.values() for fqn in fqns]) == usual:
        return frozenset()
    return frozenset(
        fqn for fqns in by_class.values() if digest([tree.module(fqn) for fqn in fqns]) != usual for fqn in fqns
    )


@contextmanager
def _exchanged(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Each module has a class derived from its own, of the same name."""
    derived: dict[type, type] = {}
    before: list[tuple[nn.Module, type]] = []
    try:
        for module in modules:
            cls = type(module)
            if cls not in derived:
                names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
                derived[cls] = type(cls.__name__, (cls,), names)
            before.append((module, cls))
            module.__class__ = derived[cls]
        yield
    finally:
        for module, cls in before:
            module.__class__ = cls


def may_ask(tree: ModuleTree, entry: str) -> bool:
    """Some function that a forward reaches asks for the class of something, for more than its name."""
    waiting: list[tuple[types.FunctionType, type | None]] = []
    for cls in {type(entry.module): None for entry in tree.modules.values()}:
        waiting += _methods(cls, ("forward",))
    waiting += _methods(type(tree.module("")), (entry,))
    seen: set[types.CodeType] = set()
    while waiting and len(seen) < MAX_FUNCTIONS:
        function, owner = waiting.pop()
        if function.__code__ in seen or _is_torch(function.__module__):
            continue
        for code in _codes(function.__code__):
            seen.add(code)
            if _asks(code):
                return True
            for name in code.co_names:
                if owner is not None:
                    waiting += _methods(owner, (name,))
                target = function.__globals__.get(name)
                if isinstance(target, types.FunctionType):
                    waiting.append((target, None))
    return False


def _methods(cls: type, names: Sequence[str]) -> list[tuple[types.FunctionType, type | None]]:
    """Functions of these names in a class and those that it derives from, properties too."""
    found: list[tuple[types.FunctionType, type | None]] = []
    for base in cls.__mro__:
        for name in names:
            value: Any = base.__dict__.get(name)
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            while not isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
                value = value.__wrapped__
            if isinstance(value, types.FunctionType):
                found.append((value, cls))
                inner = getattr(value, "__wrapped__", None)
                if isinstance(inner, types.FunctionType):
                    found.append((inner, cls))
    return found


def _is_torch(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "torch"


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _asks(code: types.CodeType) -> bool:
    if not {"type", "__class__"} & set(code.co_names):
        return False
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        if instruction.argval == "__class__" and instruction.opname.startswith("LOAD_ATTR"):
            following = index + 1
        elif instruction.argval == "type" and instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            calls = (i for i in range(index, min(index + _AHEAD, len(instructions))) if _is_call(instructions[i]))
            following = next(calls, index) + 1
        else:
            continue
        asked = instructions[following] if following < len(instructions) else None
        is_attribute = asked is not None and asked.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if not is_attribute or asked is None or asked.argval in _OWN:
            return True
    return False


def _is_call(instruction: dis.Instruction) -> bool:
    return instruction.opname in ("CALL", "CALL_FUNCTION")
