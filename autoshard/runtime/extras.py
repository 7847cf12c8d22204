"""Which parameters of a unit the plan does not know, found from the digest that stands in the plan.

A plan keeps a digest of each unit's parameter keys and not the keys. Where a model has more parameters than planned,
some set of them has to be taken away so that the rest has that digest; sets that people add are tried first.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import combinations, islice
from math import comb

from torch import nn

from autoshard.plan import Unit
from autoshard.runtime.ownership import unit_digest

MAX_SETS = 50_000
"""Sets of families, and of single parameters, that are tried."""
MAX_HASHED = 5_000_000
"""Keys that are hashed before the search ends: a few seconds, on the way to an error."""
MAX_FAMILIES = 3
"""Families of like parameters (every ``lora_A`` and every ``lora_B``) that may have been added together."""

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def added_params(unit: Unit, params: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Keys of the parameters that were added to a unit since the plan was made, sorted; empty if that cannot be told.

    Args:
        unit: as planned.
        params: what the unit has in this model, by key.
    """
    num_added = len(params) - unit.num_params
    if num_added <= 0:
        return ()
    num_bytes = sum(param.nbytes for param in params.values()) - unit.num_bytes
    num_hashed = 0
    for added in _likely(list(params), num_added):
        if sum(params[key].nbytes for key in added) != num_bytes:
            continue
        if unit_digest(params.keys() - added) == unit.digest:
            return tuple(sorted(added))
        num_hashed += unit.num_params
        if num_hashed > MAX_HASHED:
            break
    return ()


def _likely(keys: list[str], num_added: int) -> Iterator[frozenset[str]]:
    """Sets of so many keys: all in one module, families of like names, then whatever is few enough to try."""
    for group in _modules(keys):
        if len(group) == num_added:
            yield group
    families = [family for family in _families(keys) if len(family) <= num_added]
    for count in range(1, MAX_FAMILIES + 1):
        for chosen in islice(combinations(families, count), MAX_SETS):
            if sum(map(len, chosen)) == num_added:
                yield frozenset().union(*chosen)
    if comb(len(keys), num_added) <= MAX_SETS:
        yield from map(frozenset, combinations(keys, num_added))


def _modules(keys: list[str]) -> list[frozenset[str]]:
    below: dict[str, set[str]] = {}
    for key in keys:
        parts = key.split(".")
        for depth in range(1, len(parts)):
            below.setdefault(".".join(parts[:depth]), set()).add(key)
    return [frozenset(group) for group in below.values()]


def _families(keys: list[str]) -> list[frozenset[str]]:
    """Keys that differ in nothing but numbers, and keys that end alike below modules of different names."""
    alike: dict[str, set[str]] = {}
    for key in keys:
        alike.setdefault(_INDEX.sub("*", key), set()).add(key)
        parts = key.split(".")
        for depth in range(1, len(parts)):
            alike.setdefault("… " + ".".join(parts[-depth:]), set()).add(key)
    return list(dict.fromkeys(map(frozenset, alike.values())))
