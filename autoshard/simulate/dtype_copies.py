"""Copies of tensors that a model brings to a parameter's dtype, where the plan has that parameter sharded by then.

FSDP2 registers a unit's gathered parameters, in the compute dtype, from the pre-forward of its first module to the
post-forward of its last (``_fsdp_param_group.py``: ``pre_forward``, ``post_forward``), and the shards in their stored
dtype otherwise. A tensor brought to the stored dtype is cast back at the unit's border (``_fsdp_state.py``,
``_pre_forward``: ``cast_forward_inputs``): the captured tensor is that second copy; the first one, and the original if
it is an argument, come on top.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from autoshard.ir import DtypeRead, ModelGraph
from autoshard.ir.tree import Tree
from autoshard.plan import Decisions
from autoshard.simulate.profile import Copy, StepProfile
from autoshard.simulate.units import UnitSizes


def with_copies(
    graph: ModelGraph, decisions: Decisions, units: Sequence[UnitSizes], profile: StepProfile
) -> StepProfile:
    """The profile with the copies that are made under a plan; itself where there are none."""
    if not graph.root.dtype_reads or decisions.precision.param == "same":
        return profile
    copies = [
        Copy(module=read.module, start=read.position, stop=stop, num_bytes=size)
        for read in graph.root.dtype_reads
        if _is_sharded(read, graph, units, profile)
        for size, stop in ((read.stored_bytes, read.stored_stop), (read.cast_bytes, read.cast_stop))
        if size and stop > read.position
    ]
    if not copies:
        return profile
    change = [0] * (profile.num_ops + 1)
    for copy in copies:
        change[copy.start] += copy.num_bytes
        change[copy.stop] -= copy.num_bytes
    more = list(accumulate(change))
    return replace(
        profile,
        during=tuple([size + extra for size, extra in zip(profile.during, more, strict=False)]),
        between=tuple([size + extra for size, extra in zip(profile.between, more, strict=True)]),
        copies=tuple(copies),
    )


def _is_sharded(read: DtypeRead, graph: ModelGraph, units: Sequence[UnitSizes], profile: StepProfile) -> bool:
    """The unit of the parameter is not gathered where it is asked."""
    unit = next((unit for unit in units if read.param in unit.keys), None)
    if unit is None:
        return False
    tree = Tree.of(graph)
    if not {read.module, *tree.above(read.module)}.isdisjoint(unit.modules):
        return False
    runs = [run.forward for module in unit.modules for run in profile.runs.get(module, ())]
    begun = any(start < read.position for start, _ in runs)
    is_last_done = all(stop <= read.position for _, stop in runs)
    return not begun or (unit.reshard and is_last_done)
