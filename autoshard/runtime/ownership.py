"""Who owns what when a plan's units are applied to a real model: FSDP2's own rule, worked out before anything changes.

A ``fully_shard`` call takes every parameter of its modules and of the modules below them, and stops at modules to which
an earlier call was applied. A parameter that two calls reach is an error or, silently, a broken tie: a tied parameter
whose holders fall to several units, a module object that stands below two units, a unit below one applied before it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A place in which a parameter stands.

    Attributes:
        module: the module object that holds it.
        fqn: FQN of the parameter at this place.
    """

    module: nn.Module
    fqn: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """The outcome of applying units in order.

    Attributes:
        params: for each unit, the parameters that it owns by key, sorted by key. One that several units reach counts
            for the first.
        split: keys of the parameters that several units reach, with all their places.
        left_out: keys of parameters that no unit reaches.
    """

    params: tuple[dict[str, nn.Parameter], ...]
    split: dict[str, tuple[str, ...]]
    left_out: tuple[str, ...]


def holders(model: nn.Module) -> dict[str, tuple[nn.Parameter, tuple[Holder, ...]]]:
    """Each parameter by its key (first FQN) with all places in which it stands, the key's place first."""
    found: dict[nn.Parameter, list[Holder]] = {}
    for module_fqn, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            fqn = f"{module_fqn}.{name}" if module_fqn else name
            found.setdefault(param, []).append(Holder(module=module, fqn=fqn))
    return {places[0].fqn: (param, tuple(places)) for param, places in found.items()}


def ownership(model: nn.Module, units: Sequence[Sequence[nn.Module]], replicated: Iterable[str] = ()) -> Ownership:
    """Who owns what.

    Args:
        model: not sharded yet.
        units: the module objects of each unit, in the order of application.
        replicated: keys of parameters that no unit takes.
    """
    reached_by = _reached_by(units)
    owned: list[dict[str, nn.Parameter]] = [{} for _ in units]
    split: dict[str, tuple[str, ...]] = {}
    left_out: list[str] = []
    kept = frozenset(replicated)
    for key, (param, places) in sorted(holders(model).items(), key=lambda item: item[0]):
        if key in kept:
            continue
        owners = set[int]().union(*(reached_by.get(place.module, ()) for place in places))
        if not all(place.module in reached_by for place in places):
            left_out.append(key)
            continue
        if len(owners) > 1:
            split[key] = tuple(place.fqn for place in places)
        owned[min(owners)][key] = param
    return Ownership(params=tuple(owned), split=split, left_out=tuple(left_out))


def _reached_by(units: Sequence[Sequence[nn.Module]]) -> dict[nn.Module, set[int]]:
    reached_by: dict[nn.Module, set[int]] = {}
    applied: set[nn.Module] = set()
    for index, modules in enumerate(units):
        stack, seen = list(modules), set(modules)
        while stack:
            module = stack.pop()
            reached_by.setdefault(module, set()).add(index)
            below = [child for child in module.children() if child not in applied and child not in seen]
            seen.update(below)
            stack.extend(below)
        applied.update(modules)
    return reached_by


def unit_digest(keys: Iterable[str]) -> str:
    """Digest of a unit's parameter keys, as it stands in a plan: 16 hex digits."""
    return hashlib.sha256("\n".join(sorted(keys)).encode("utf-8", "surrogatepass")).hexdigest()[:16]
