"""The same step at another batch size or sequence length, from captures at three small ones.

Every number of a step (bytes of storages, bytes and operations of ops, sizes of inputs) is a product of dims, and each
dim is linear in the size that varies. So it is a polynomial of degree 2 or less wherever the model does the same at
each size (attention holds S × S; a contrastive loss B × B), and three values at equal distances give it exactly, in
whole numbers, by Newton's forward differences: ``f(k) = f0 + k d1 + k (k - 1) / 2 d2``.

That the model does the same is not taken for granted: ``first_difference`` compares two graphs in all but numbers, and
whoever extrapolates captures a fourth size and compares the numbers too.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from autoshard.ir.graph import DtypeRead, ModelGraph, ModuleSpan, OpNode, Region, StorageInfo

NUMBERS: dict[type, tuple[str, ...]] = {
    OpNode: ("flops", "bytes_read", "bytes_written"),
    StorageInfo: ("nbytes",),
    ModuleSpan: ("input_bytes", "output_bytes"),
    DtypeRead: ("stored_bytes", "cast_bytes"),
}
"""What depends on sizes; everything else of a region has to be the same at each."""


def first_difference(one: ModelGraph, other: ModelGraph, *, numbers: bool = False) -> str:
    """Where two captures of one model differ in more than sizes, in words; empty if they do not.

    Args:
        one: a capture.
        other: a capture at another size.
        numbers: numbers have to be the same as well.
    """
    for name in ("frontend", "entry", "loss", "compute_dtype", "modules", "params", "buffers"):
        if getattr(one, name) != getattr(other, name):
            return _named(name, getattr(one, name), getattr(other, name))
    for tensor, twin in zip(one.inputs, other.inputs, strict=False):
        if (tensor.name, tensor.dtype, len(tensor.shape)) != (twin.name, twin.dtype, len(twin.shape)):
            return f"input {tensor.name} has another form"
        if numbers and tensor.shape != twin.shape:
            return f"input {tensor.name} is {list(tensor.shape)} and {list(twin.shape)}"
    if len(one.inputs) != len(other.inputs):
        return "the inputs hold another number of tensors"
    if [(d.code, d.where) for d in one.diagnostics] != [(d.code, d.where) for d in other.diagnostics]:
        return "capture had other things to say"
    if [region.name for region in one.regions] != [region.name for region in other.regions]:
        return "other blocks are alike"
    for mine, theirs in zip(one.regions, other.regions, strict=True):
        found = _region_difference(mine, theirs, numbers)
        if found:
            return found
    return ""


def extrapolated(samples: tuple[ModelGraph, ModelGraph, ModelGraph], steps: int) -> ModelGraph:
    """The graph at another size.

    Args:
        samples: captures at three sizes at equal distances, the smallest first, which differ in numbers alone.
        steps: how many such distances the size lies above the smallest.
    """
    first = samples[0]
    inputs = tuple(
        replace(mine[0], shape=_values(steps, *(each.shape for each in mine)))
        for mine in zip(*(graph.inputs for graph in samples), strict=True)
    )
    regions = tuple(
        replace(
            mine[0],
            **{
                name: tuple(
                    _scaled(steps, *nodes) for nodes in zip(*(getattr(region, name) for region in mine), strict=True)
                )
                for name in ("forward", "backward", "storages", "spans", "dtype_reads")
            },
        )
        for mine in zip(*(graph.regions for graph in samples), strict=True)
    )
    return replace(first, inputs=inputs, regions=regions, diagnostics=samples[-1].diagnostics)


def _scaled(steps: int, *nodes: Any) -> Any:
    names = NUMBERS[type(nodes[0])]
    changed = {}
    for name in names:
        values = [getattr(node, name) for node in nodes]
        if not values[0] == values[1] == values[2]:
            changed[name] = _value(steps, *values)
    return replace(nodes[0], **changed) if changed else nodes[0]


def _value(steps: int, zero: int, one: int, two: int) -> int:
    return zero + steps * (one - zero) + steps * (steps - 1) // 2 * (two - 2 * one + zero)


def _values(steps: int, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_value(steps, *dims) for dims in zip(*shapes, strict=True))


def _region_difference(one: Region, other: Region, numbers: bool) -> str:
    for phase in ("forward", "backward"):
        mine, theirs = getattr(one, phase), getattr(other, phase)
        for index, (op, twin) in enumerate(zip(mine, theirs, strict=False)):
            if not _alike(op, twin, numbers):
                where = f"op {index} of {phase} in {op.module or '(root)'}"
                if op.target != twin.target:
                    return f"{where} is {op.target} and {twin.target}"
                return f"{where} ({op.target}) differs in {_fields(op, twin, numbers)}"
        if len(mine) != len(theirs):
            return f"{phase} runs {len(mine)} and {len(theirs)} ops"
    for name in ("storages", "spans", "dtype_reads"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if len(mine) != len(theirs):
            return f"it has {len(mine)} and {len(theirs)} {name}"
        for index, (node, twin) in enumerate(zip(mine, theirs, strict=True)):
            if not _alike(node, twin, numbers):
                return f"{name}[{index}] differs in {_fields(node, twin, numbers)}"
    if one.calls != other.calls or one.module != other.module:
        return "its blocks are called otherwise"
    return ""


def _alike(one: Any, other: Any, numbers: bool) -> bool:
    return one == other or (not numbers and next(_differing(one, other, numbers), None) is None)


def _differing(one: Any, other: Any, numbers: bool) -> Iterator[str]:
    varying = () if numbers else NUMBERS[type(one)]
    for field in fields(one):
        if field.name not in varying and getattr(one, field.name) != getattr(other, field.name):
            yield field.name


def _fields(one: Any, other: Any, numbers: bool) -> str:
    return ", ".join(
        f"{name} ({getattr(one, name)} and {getattr(other, name)})" if name in NUMBERS[type(one)] else name
        for name in _differing(one, other, numbers)
    )


def _named(name: str, one: Any, other: Any) -> str:
    """The first of a list that differs, where it is one."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        for mine, theirs in zip(one, other, strict=False):
            if mine != theirs:
                where = getattr(mine, "fqn", getattr(mine, "key", getattr(mine, "name", ""))) or "(root)"
                changed = [f.name for f in fields(mine) if getattr(mine, f.name) != getattr(theirs, f.name)]
                return f"{name}: {where} differs in {', '.join(changed)}" if is_dataclass(mine) else name
        return f"{len(one)} and {len(other)} {name}"
    return f"{name}: {one} and {other}"
