"""Who reads a parameter: the fact behind most reported failures.

FSDP2 unshards the parameters of a unit when a hooked forward of the unit starts. So a read is safe exactly where a
module of the owning unit is on the stack of running forwards.
"""

from autoshard.ir import LOSS, ModelGraph, ParamInfo

Stack = tuple[str, ...]


def outside_reads(graph: ModelGraph) -> tuple[tuple[str, Stack], ...]:
    """(parameter key, stack) of every read during which no module that registers the parameter was running."""
    return tuple(
        (param.key, stack)
        for param in graph.params
        for stack in param.readers
        if not any(holder in stack for holder in param.holders)
    )


def uncovered_reads(
    param: ParamInfo, modules: tuple[str, ...], updaters: frozenset[str] = frozenset()
) -> tuple[Stack, ...]:
    """Stacks of the reads that happen while none of these modules runs.

    Args:
        param: the parameter.
        modules: those of the unit that would own it.
        updaters: modules whose own code uses it sharded (``analysis.updates``); their reads need no unit.
    """
    return tuple(
        stack for stack in param.readers if stack[-1] not in updaters and not any(module in stack for module in modules)
    )


def reader(stack: Stack) -> str:
    """The innermost module of a stack, as people read it."""
    if not stack or stack[-1] == LOSS:
        return LOSS
    return stack[-1] or "(root)"
