"""Which parameters each unit owns, and in which order units are applied.

FSDP2 walks down from the modules of a unit and stops at every module that already belongs to a unit; what it finds on
the way is the unit's. So ownership follows from the order, and the order must put inner units first.
"""

import hashlib
import heapq
from collections.abc import Collection, Iterable, Sequence

from autoshard.ir import ModelGraph
from autoshard.ir.tree import Tree


def owners(
    graph: ModelGraph, units: Sequence[Sequence[str]], replicated: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Keys of the parameters that each unit owns.

    A tied parameter that two units claim is listed under both: whether that may be is for ``verify`` to say.

    Args:
        graph: the model.
        units: modules of each unit, by canonical FQN or alias, in the order of application.
        replicated: keys of parameters that no unit owns.

    Returns:
        For each unit its keys, in the order in which its modules hold them.

    Raises:
        KeyError: a unit names a module that does not exist.
    """
    tree = Tree.of(graph)
    left_out = frozenset(replicated)
    taken: set[str] = set()
    owned = []
    for modules in units:
        roots = [canonical(tree, module) for module in modules]
        owned.append(_claimed(tree, roots, taken, left_out))
        taken.update(roots)
    return tuple(owned)


def canonical(tree: Tree, path: str) -> str:
    """Canonical FQN of a path; ``KeyError`` if no module stands there."""
    fqn = tree.canonical(path)
    if fqn is None:
        raise KeyError(path)
    return fqn


def _claimed(tree: Tree, roots: list[str], taken: set[str], left_out: frozenset[str]) -> tuple[str, ...]:
    if len(roots) == 1 and not left_out and taken.isdisjoint(tree.below(roots[0])):
        return tree.keys(roots[0])
    keys: dict[str, None] = {}
    seen: set[str] = set()
    for root in roots:
        _claim(tree, root, taken, seen, keys)
    return tuple(key for key in keys if key not in left_out)


def _claim(tree: Tree, root: str, taken: set[str], seen: set[str], keys: dict[str, None]) -> None:
    stack = [root]
    while stack:
        fqn = stack.pop()
        if fqn in seen or fqn in taken:
            continue
        seen.add(fqn)
        node = tree.nodes[fqn]
        keys.update(dict.fromkeys(node.own_params))
        stack += reversed(node.children)


def application_order(graph: ModelGraph, groups: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Units in the order in which they have to be applied: inner ones first, the root last.

    A unit comes after every unit that has a member inside one of its own members. Where this leaves a choice, the
    post-order of the first member decides.

    Raises:
        ValueError: two units contain members of each other, so that no order is right.
        KeyError: a unit names a module that does not exist.
    """
    tree = Tree.of(graph)
    units = [tuple(group) for group in groups]
    units_at: dict[str, list[int]] = {}
    for index, unit in enumerate(units):
        for module in unit:
            units_at.setdefault(canonical(tree, module), []).append(index)
    outer_of = [_outer_units(tree, unit, units_at) - {index} for index, unit in enumerate(units)]
    waiting = [0] * len(units)
    for outer in outer_of:
        for index in outer:
            waiting[index] += 1

    def rank(index: int) -> tuple[int, int]:
        return tree.post_index[canonical(tree, units[index][0])], index

    ready = [rank(index) for index, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, index = heapq.heappop(ready)
        ordered.append(units[index])
        for outer_index in outer_of[index]:
            waiting[outer_index] -= 1
            if waiting[outer_index] == 0:
                heapq.heappush(ready, rank(outer_index))
    if len(ordered) < len(units):
        stuck = [units[index] for index, count in enumerate(waiting) if count > 0]
        raise ValueError(f"units that contain members of each other cannot be ordered: {stuck}")
    return tuple(ordered)


def _outer_units(tree: Tree, unit: tuple[str, ...], units_at: dict[str, list[int]]) -> set[int]:
    outer: set[int] = set()
    for module in unit:
        for ancestor in tree.above(canonical(tree, module)):
            outer.update(units_at.get(ancestor, ()))
    return outer


def unit_digest(keys: Iterable[str]) -> str:
    """First 16 hex digits of the sha256 of the sorted keys, one a line."""
    return hashlib.sha256("\n".join(sorted(keys)).encode("utf-8", "surrogatepass")).hexdigest()[:16]
