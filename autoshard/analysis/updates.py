"""Parameters that code outside their modules updates in place, element by element, while they are sharded.

A teacher that follows its student inside a forward is the usual case. A gathered copy is dropped after use and the
change with it; the shards themselves can be updated, each rank its own, as long as an op is pointwise and touches
nothing but parameters of one shape. So these reads do not need the parameters unsharded: they need them *sharded*.
"""

from collections import defaultdict

from autoshard.ir import ModelGraph, OpNode

POINTWISE = frozenset({"add_", "addcdiv_", "addcmul_", "copy_", "div_", "lerp_", "mul_", "neg_", "sub_", "zero_"})
"""In-place ops of which each element of the result depends on the same element of the arguments alone."""


def sharded_updates(graph: ModelGraph) -> dict[str, frozenset[str]]:
    """By parameter key, the modules whose own code updates or reads it so that it has to be sharded meanwhile.

    A parameter counts if, of what such a module's code does with it, everything is a pointwise update among parameters
    of one shape, and something is written; its partners in those ops then count too.
    """
    if not any("written-in-forward" in param.traits for param in graph.params) or not graph.regions:
        return {}
    shapes = {param.key: param.shape for param in graph.params}
    holders = {param.key: set(param.holders) for param in graph.params}
    updates: dict[tuple[str, str], set[str]] = defaultdict(set)
    unfit: set[tuple[str, str]] = set()
    for op in (op for region in graph.regions for op in region.forward):
        for key in () if op.is_view else op.params:
            place = (key, op.module)
            if op.module in holders[key] or not _is_pointwise(op, shapes):
                unfit.add(place)
            updates[place].update(op.params)
    # A partner that is not fit (read whole by the same code) makes its partners unfit, until nothing changes.
    while grown := {
        (key, module)
        for (key, module), partners in updates.items()
        if (key, module) not in unfit and any((partner, module) in unfit for partner in partners)
    }:
        unfit |= grown
    written = {param.key for param in graph.params if "written-in-forward" in param.traits}
    found: dict[str, set[str]] = defaultdict(set)
    for (key, module), partners in updates.items():
        if (key, module) not in unfit and partners & written:
            found[key].add(module)
    return {key: frozenset(modules) for key, modules in found.items()}


def _is_pointwise(op: OpNode, shapes: dict[str, tuple[int, ...]]) -> bool:
    name = op.target.split(".")[1] if "." in op.target else op.target
    return name in POINTWISE and not op.inputs and len({shapes[key] for key in op.params}) == 1
