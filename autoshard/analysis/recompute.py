"""Which blocks may compute their activations again in backward, and why others may not.

A second run has to give what the first one gave and leave nothing changed behind: no statistics, no parameter and no
memory from before may be written. Only whole blocks are asked for, the outermost of repeated siblings: that is where
recompute saves most for what it costs, and like blocks are decided alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.analysis.order import Run, runs
from autoshard.analysis.repeats import outermost, repeated_blocks
from autoshard.errors import Diagnostic
from autoshard.findings import Finding, condense
from autoshard.ir import ModelGraph, ModuleSpan
from autoshard.ir.tree import Tree

CODE = "AS223"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputable:
    """What the planner may let recompute.

    Attributes:
        modules: FQNs of the blocks that may, in the order of execution.
        diagnostics: blocks that may not, with the reason, alike ones together.
    """

    modules: tuple[str, ...]
    diagnostics: tuple[Diagnostic, ...]


def may_recompute(graph: ModelGraph) -> tuple[str, ...]:
    """FQNs of the blocks that may recompute, in the order of execution."""
    return recomputable(graph).modules


def recomputable(graph: ModelGraph) -> Recomputable:
    """The blocks that may recompute, and diagnostics for those that may not.

    A block in whose backward nothing is trained has nothing to recompute and is passed over. Without ops (frontend
    tree) none may: it cannot be seen what a second run would write.
    """
    by_module: dict[str, list[Run]] = {}
    for run in runs(graph):
        by_module.setdefault(run.module, []).append(run)
    allowed: list[tuple[int, str]] = []
    findings = []
    for fqn in outermost(graph, {module for block in repeated_blocks(graph) for module in block.modules}):
        found = by_module.get(fqn, [])
        if not any(run.span.backward for run in found):
            continue
        reasons = list(_reasons(graph, fqn, found))
        if not reasons:
            allowed.append((found[0].start, fqn))
        else:
            findings.append(
                Finding(
                    code=CODE,
                    severity="note",
                    where=fqn,
                    message=f"may not recompute: {reasons[0]}",
                    remedy="plan with recompute=none, or change what the reason names",
                )
            )
    return Recomputable(modules=tuple(fqn for _, fqn in sorted(allowed)), diagnostics=condense(findings))


def mingling(spans: Sequence[ModuleSpan]) -> tuple[str, ...]:
    """FQNs of the modules with two runs of which the one's backward begins before the other's has ended."""
    by_module: dict[str, list[tuple[int, int]]] = {}
    for span in spans:
        if span.backward is not None:
            by_module.setdefault(span.module, []).append(span.backward)
    found = []
    for fqn, backwards in by_module.items():
        in_order = sorted(backwards)
        if any(later[0] < earlier[1] for earlier, later in pairwise(in_order)):
            found.append(fqn)
    return tuple(found)


def _reasons(graph: ModelGraph, fqn: str, found: list[Run]) -> Iterator[str]:
    tree = Tree.of(graph)
    inside = sorted(tree.below(fqn), key=tree.pre_index.__getitem__)
    if tree.nodes[fqn].num_calls != 1 or len(found) != 1:
        yield f"it runs {tree.nodes[fqn].num_calls} times in a step"
    around = sorted(tree.above(fqn), key=tree.pre_index.__getitem__)
    for other in (*inside, *around):
        if "checkpointed" in tree.nodes[other].traits:
            yield f"{other or 'the root'} recomputes by itself already"
    for inner in inside:
        traits = tree.nodes[inner].traits
        if "batch-statistics" in traits:
            yield f"{inner} keeps statistics over batches, which would be updated twice"
        if "script" in traits:
            yield f"{inner} is a scripted module, on which the hooks of recompute do not run"
    for key in tree.keys(fqn):
        if "written-in-forward" in tree.params[key].traits:
            yield f"its forward writes to the parameter {key}"
    for run in found:
        yield from _reasons_of_run(run)


def _reasons_of_run(run: Run) -> Iterator[str]:
    span, region = run.span, run.region
    if span.output_kind.startswith("opaque:"):
        yield f"its result is of {span.output_kind.removeprefix('opaque:')}, in which no tensors are found"
    if span.escapes:
        yield "a tensor made in it is used later although it is not in its result"
    for op in region.forward[slice(*span.forward)]:
        for index in op.outputs if op.bytes_written else ():
            born = region.storages[index].born
            if born.phase == "caller" or (born.phase == "forward" and born.index < span.forward[0]):
                yield f"{op.target} in {op.module} writes to memory that was there before it ran"
                return
