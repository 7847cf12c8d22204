"""When modules run: every run of every module's forward, in the order in which it starts.

A graph describes repeated blocks once (a region) and says where they stand (calls). Here calls are followed, so that
each run of each module is listed with its own FQN; ops are not copied, only counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.ir import ModelGraph, ModuleSpan, Region
from autoshard.ir.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a module's forward.

    Attributes:
        module: FQN of the module that ran.
        start: position of its first forward op in the whole step, ops of called regions counted.
        end: position past its last forward op.
        region: where its span stands.
        span: the facts; its FQN and positions are those of the region.
    """

    module: str
    start: int
    end: int
    region: Region
    span: ModuleSpan


def runs(graph: ModelGraph) -> tuple[Run, ...]:
    """All module runs of the step by their start, outer before inner; empty for a graph without regions."""
    if not graph.regions:
        return ()
    regions = {region.name: region for region in graph.regions}
    sizes: dict[str, int] = {}
    for region in graph.regions:
        sizes[region.name] = len(region.forward) + sum(sizes[call.region] for call in region.calls)
    return tuple(_runs_of(graph.root, regions, sizes, Tree.of(graph), "", 0))


def _runs_of(
    region: Region, regions: dict[str, Region], sizes: dict[str, int], tree: Tree, module: str, offset: int
) -> Iterator[Run]:
    """Runs of a region that stands for ``module`` and begins at ``offset``."""
    calls = list(region.calls)
    skipped = 0
    for span in region.spans:
        while calls and _is_before(calls[0].forward, calls[0].module, span, tree):
            call = calls.pop(0)
            inner = regions[call.region]
            begins = offset + call.forward + skipped
            yield from _runs_of(inner, regions, sizes, tree, renamed(tree, region, module, call.module), begins)
            skipped += sizes[call.region]
        inside = sum(sizes[call.region] for call in calls if is_within(call.forward, call.module, span, tree))
        start = offset + span.forward[0] + skipped
        end = offset + span.forward[1] + skipped + inside
        yield Run(module=renamed(tree, region, module, span.module), start=start, end=end, region=region, span=span)
    for call in calls:
        begins = offset + call.forward + skipped
        inner_module = renamed(tree, region, module, call.module)
        yield from _runs_of(regions[call.region], regions, sizes, tree, inner_module, begins)
        skipped += sizes[call.region]


def _is_before(position: int, called: str, span: ModuleSpan, tree: Tree) -> bool:
    if position != span.forward[0]:
        return position < span.forward[0]
    return not tree.is_inside(called, span.module)


def is_within(position: int, called: str, span: ModuleSpan, tree: Tree) -> bool:
    """A call at this position, for this module, happens during the span."""
    first, end = span.forward
    if first < position < end:
        return True
    return position in (first, end) and tree.is_inside(called, span.module)


def renamed(tree: Tree, region: Region, module: str, fqn: str) -> str:
    """FQN that a module of a region's representative has where the region stands for ``module``."""
    if module == region.module or not tree.is_inside(fqn, region.module):
        return fqn
    inner = fqn[len(region.module) + 1 :] if region.module else fqn
    path = ".".join(part for part in (module, inner) if part)
    return tree.canonical(path) or fqn


def execution_order(graph: ModelGraph) -> tuple[str, ...]:
    """FQNs of the called modules by their first run, parents before children.

    Without regions there is no order to see: the tree's own is taken.
    """
    if not graph.regions:
        return tuple(node.fqn for node in graph.modules if node.num_calls)
    nodes = Tree.of(graph).nodes
    return tuple(dict.fromkeys(run.module for run in runs(graph) if run.module in nodes))


def read_positions(graph: ModelGraph) -> tuple[int, ...]:
    """Positions in the whole step of the forward ops that read a parameter, sorted."""
    if not graph.regions:
        return ()
    own: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for region in graph.regions:
        found: list[int] = []
        calls = list(region.calls)
        skipped = 0
        for index, op in enumerate((*region.forward, None)):
            while calls and calls[0].forward == index:
                inner = calls.pop(0).region
                found += [index + skipped + position for position in own[inner]]
                skipped += sizes[inner]
            if op is not None and op.params:
                found.append(index + skipped)
        own[region.name] = tuple(found)
        sizes[region.name] = len(region.forward) + skipped
    return own[graph.root.name]
