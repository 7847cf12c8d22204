"""Which modules run only for some data, so that ranks may differ in running them.

A unit is gathered by a collective. If one rank runs it and another does not, they wait for each other forever. Three
signs of it can be seen in a captured step: only some of several example inputs run the module; with other random
numbers or other data it ran more or less often, or in another order; or a module picks rows by their values and runs
the elements of a list side by side on what it picked (experts), where a rank may pick nothing for one of them.

That of the like elements of a list some ran and some did not is no such sign: a model that has layers to spare, or
takes them in turn, does the same on all ranks.
"""

from collections.abc import Iterator
from itertools import pairwise

from autoshard.analysis.order import Run, runs
from autoshard.analysis.repeats import siblings
from autoshard.ir import ModelGraph
from autoshard.ir.tree import Tree

SOME_INPUTS = "conditional"
"""Trait of a module that only some of several example inputs run."""

UNCERTAIN = {
    "by-chance": "with other random numbers it runs more or less often, or in another order",
    "by-value": "with other data it runs more or less often, or in another order",
}
"""Traits of modules that other answers than those of the captured step make run otherwise."""

DATA_DEPENDENT = "AS102"
"""Code with which capture says that a module's op depends on values that a captured step does not have."""


def on_demand(graph: ModelGraph) -> dict[str, str]:
    """Modules that may run on some ranks only, outermost ones, with the sign of it."""
    tree = Tree.of(graph)
    found: dict[str, str] = {}
    by_module: dict[str, list[Run]] = {}
    for run in runs(graph):
        by_module.setdefault(run.module, []).append(run)
    for node in graph.modules:
        ran_for_others = bool(graph.regions) and node.num_calls > 0 and node.fqn not in by_module
        if node.fqn and (SOME_INPUTS in node.traits or ran_for_others):
            found[node.fqn] = "only some of the example inputs run it"
        for trait, why in UNCERTAIN.items():
            if trait in node.traits:
                found.setdefault(node.fqn, why)
    picking = {each.where for each in graph.diagnostics if each.code == DATA_DEPENDENT}
    for (anchor, _), modules in siblings(graph).items():
        # A parent with a forward names its children one by one: which of them run is written down there.
        if tree.nodes[anchor].has_forward:
            continue
        called = [run for fqn in modules for run in by_module.get(fqn, ())]
        if (_caller(tree, anchor) or "(root)") in picking and len(called) > 1 and _are_side_by_side(called):
            why = f"{_caller(tree, anchor) or 'the root'} chooses by data what it runs of {anchor}"
            found.update(dict.fromkeys(modules, why))
    return {fqn: why for fqn, why in found.items() if not tree.above(fqn) & found.keys()}


def _caller(tree: Tree, container: str) -> str:
    while container and not tree.nodes[container].has_forward:
        container = tree.nodes[container].parent
    return container


def _are_side_by_side(found: list[Run]) -> bool:
    """No run reads what came out of the run before it."""
    found = sorted(found, key=lambda run: run.start)
    return not any(_feeds(first, second) for first, second in pairwise(found))


def _feeds(first: Run, second: Run) -> bool:
    if first.region is not second.region or first.span.forward[1] > second.span.forward[0]:
        return True
    made = {index for op in _ops(first) for index in op}
    for op in first.region.forward[first.span.forward[1] : second.span.forward[0]]:
        if made.intersection(op.inputs):
            made.update(op.outputs)
    inside = second.region.forward[slice(*second.span.forward)]
    return any(made.intersection(op.inputs) for op in inside)


def _ops(run: Run) -> Iterator[tuple[int, ...]]:
    return (op.outputs for op in run.region.forward[slice(*run.span.forward)])
