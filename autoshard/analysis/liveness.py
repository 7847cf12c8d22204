"""Memory of a module's forward: what it keeps for backward, and how high it rises on the way.

Counted in the storages that the step allocates; parameters, gradients, inputs and buffers are not among them. A region
that is called counts at the place of its call, with the figures of its representative.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from autoshard.analysis.order import is_within, runs
from autoshard.analysis.space import ModuleMemory
from autoshard.ir import ModelGraph, ModuleSpan, Region
from autoshard.ir.tree import Tree

_FROM_ELSEWHERE = ("input", "buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Bytes along the forward of a region; a slot is an op or a call, a call before the op at its position.

    Attributes:
        call_positions: positions of the calls, sorted.
        before: bytes alive before each slot, and after the last one.
        during: bytes alive during each slot.
        saved: bytes that live into backward, born before each slot, and by the end.
    """

    call_positions: tuple[int, ...]
    before: Sequence[int]
    during: Sequence[int]
    saved: Sequence[int]

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(self.during, default=0)


def module_memory(graph: ModelGraph) -> tuple[ModuleMemory, ...]:
    """Memory of every module that runs, in execution order; over several runs saved bytes add up."""
    curves: dict[str, Curve] = {}
    for region in graph.regions:
        curves[region.name] = forward_curve(region, curves)
    tree = Tree.of(graph)
    saved: dict[str, int] = {}
    peak: dict[str, int] = {}
    for run in runs(graph):
        if run.module not in tree.nodes:
            continue
        curve = curves[run.region.name]
        first, end = _slots(run.region, run.span, curve, tree)
        rise = max(curve.during[first:end], default=curve.before[first]) - curve.before[first]
        saved[run.module] = saved.get(run.module, 0) + curve.saved[end] - curve.saved[first]
        peak[run.module] = max(peak.get(run.module, 0), rise)
    return tuple(ModuleMemory(module=fqn, saved_bytes=saved[fqn], peak_bytes=peak[fqn]) for fqn in saved)


def forward_curve(region: Region, curves: dict[str, Curve]) -> Curve:
    """The curve of a region, given those of the regions that it calls."""
    positions = tuple(call.forward for call in region.calls)
    num_slots = len(region.forward) + len(positions)
    born, gone, kept = ([0] * (num_slots + 1) for _ in range(3))
    extra = [0] * num_slots
    for storage in region.storages:
        if storage.born.phase != "forward" or storage.kind in _FROM_ELSEWHERE:
            continue
        slot = _slot_of_op(positions, storage.born.index)
        born[slot] += storage.nbytes
        if storage.dies.phase == "forward":
            gone[_slot_of_op(positions, storage.dies.index) + 1] += storage.nbytes
        elif storage.dies.phase == "backward":
            kept[slot] += storage.nbytes
    for index, call in enumerate(region.calls):
        slot, inner = call.forward + index, curves[call.region]
        extra[slot] = inner.peak_bytes - inner.saved[-1]
        born[slot] += inner.saved[-1]
        kept[slot] += inner.saved[-1]
    # Memory that dies with a slot is free before the next one; what a slot makes is there while it runs.
    after = list(accumulate(new - old for new, old in zip(born, gone, strict=True)))
    during = [after[slot] + extra[slot] for slot in range(num_slots)]
    before = [after[slot] - born[slot] for slot in range(num_slots + 1)]
    saved = [0, *accumulate(kept[:num_slots])]
    return Curve(call_positions=positions, before=before, during=during, saved=saved)


def _slot_of_op(call_positions: tuple[int, ...], op: int) -> int:
    return op + bisect_right(call_positions, op)


def _slots(region: Region, span: ModuleSpan, curve: Curve, tree: Tree) -> tuple[int, int]:
    """First and past-the-end slot of a span."""
    first, end = span.forward
    if not region.calls:
        return first, end
    inside = [index for index, call in enumerate(region.calls) if is_within(call.forward, call.module, span, tree)]
    before_first = bisect_left(curve.call_positions, first)
    at_first = bisect_right(curve.call_positions, first) - before_first
    inside_at_first = sum(1 for index in inside if region.calls[index].forward == first)
    start = first + before_first + at_first - inside_at_first
    return start, start + (end - first) + len(inside)
