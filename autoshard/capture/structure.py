"""Digests of module structure: equal digests are isomorphic modules.

A digest covers the class, the plain attributes, parameters and buffers (names, shapes, dtypes, ``requires_grad``),
which parameters are one object, and the children's digests. Attributes that only say where a module stands, such as
``layer_idx``, are left out: a whole number counts as such if in *every* instance of the class it is the instance's own
index in a container above it (or that index plus one), for at least two different indices. Objects of other kinds,
such as a configuration, count by their type only.
"""

import hashlib
import re
from collections import defaultdict
from typing import Any

import torch

from autoshard.capture.tree import ModuleEntry, ModuleTree, dtype_name

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_INDEX = re.compile(r"\d+")


def repeat_classes(tree: ModuleTree) -> dict[str, str]:
    """The digest of each module, by canonical FQN."""
    places = placement_attributes(tree)
    shared = {key for key, entry in tree.params.items() if len(entry.holders) > 1}
    digests: dict[str, str] = {}
    subtree_ties: dict[str, tuple[str, ...]] = {}
    for fqn in reversed(tree.modules):  # children come after their parent in pre-order
        entry = tree.modules[fqn]
        ties = [key for key in entry.params if key in shared]
        for child in entry.children:
            ties += subtree_ties.get(child, ())
        subtree_ties[fqn] = tuple(ties)
        facts = (
            _class_name(entry),
            _attributes(entry, places),
            _params(entry, tree),
            _buffers(entry, tree),
            _tie_pattern(ties, fqn, tree),
            tuple(len(getattr(entry.module, hooks)) for hooks in ("_forward_hooks", "_forward_pre_hooks")),
            tuple(
                (name, digests.get(tree.fqn_of[id(child)], "cycle"))
                for name, child in entry.module._modules.items()
                if child is not None
            ),
        )
        digests[fqn] = hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
    return digests


def _class_name(entry: ModuleEntry) -> str:
    return f"{type(entry.module).__module__}.{type(entry.module).__qualname__}"


def _indices_above(fqn: str) -> set[int]:
    return {int(part) for part in fqn.split(".") if _INDEX.fullmatch(part)}


def placement_attributes(tree: ModuleTree) -> set[tuple[str, str]]:
    """Pairs (class name, attribute) whose value is nothing but the instance's index."""
    values: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    broken: set[tuple[str, str, int]] = set()
    for fqn, entry in tree.modules.items():
        indices = _indices_above(fqn)
        for name, value in vars(entry.module).items():
            if type(value) is not int or name.startswith("_"):
                continue
            for offset in (0, 1):
                known = (_class_name(entry), name, offset)
                if value - offset in indices:
                    values[known].add(value)
                else:
                    broken.add(known)
    return {
        (cls, name)
        for (cls, name, offset), seen in values.items()
        if len(seen) > 1 and (cls, name, offset) not in broken
    }


def _attributes(entry: ModuleEntry, places: set[tuple[str, str]]) -> tuple[tuple[str, Any], ...]:
    cls, indices = _class_name(entry), {str(index) for index in _indices_above(entry.fqn)}
    found = []
    for name, value in sorted(vars(entry.module).items()):
        if name.startswith("_") or name == "training" or (cls, name) in places:
            continue
        found.append((name, _plain(value, indices)))
    return tuple(found)


def _plain(value: Any, indices: set[str], depth: int = 0) -> Any:
    """A value that prints alike in isomorphic modules: scalars as they are, anything else by its type."""
    if isinstance(value, str) and "." in value:
        return ".".join("#" if part in indices else part for part in value.split("."))
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, tuple | list) and depth < 3:
        return tuple(_plain(part, indices, depth + 1) for part in value)
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype))
    return type(value).__qualname__


def _params(entry: ModuleEntry, tree: ModuleTree) -> tuple[Any, ...]:
    facts = []
    for name, param in entry.module._parameters.items():
        if param is not None:
            facts.append((name, tuple(param.shape), dtype_name(param.dtype), param.requires_grad))
    return tuple(facts)


def _buffers(entry: ModuleEntry, tree: ModuleTree) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(buffer.shape), dtype_name(buffer.dtype))
        for name, buffer in entry.module._buffers.items()
        if buffer is not None
    )


def _tie_pattern(ties: list[str], fqn: str, tree: ModuleTree) -> tuple[Any, ...]:
    """Shared parameters of a subtree: by order of appearance if all holders are inside, else by key."""
    numbers: dict[str, int] = {}
    pattern: list[Any] = []
    for key in ties:
        is_inside = all(_is_within(holder, fqn, tree) for holder in tree.params[key].holders)
        pattern.append(numbers.setdefault(key, len(numbers)) if is_inside else key)
    return tuple(pattern)


def _is_within(fqn: str, ancestor: str, tree: ModuleTree) -> bool:
    while fqn != ancestor and fqn:
        fqn = tree.modules[fqn].parent
    return fqn == ancestor
