"""Runs of isomorphic siblings: the blocks of a model, found by structure and never by class names."""

from collections.abc import Set as AbstractSet

from autoshard.analysis.space import Block
from autoshard.ir import ModelGraph
from autoshard.ir.tree import Tree


def repeated_blocks(graph: ModelGraph) -> tuple[Block, ...]:
    """Runs of two or more siblings of equal structure that hold parameters and run, outermost first.

    An element of a container that is itself a container without forward is looked through: in a list of lists, the
    modules at the same kind of place in each inner list are siblings.
    """
    tree = Tree.of(graph)
    found = []
    for (_, repeat_class), modules in siblings(graph).items():
        called = tuple(fqn for fqn in modules if tree.nodes[fqn].num_calls)
        if len(called) > 1:
            found.append((repeat_class, called))
    members = {module for _, modules in found for module in modules}
    nesting = {modules: len(members & tree.above(modules[0])) for _, modules in found}
    found.sort(key=lambda block: nesting[block[1]])
    return tuple(Block(repeat_class=repeat_class, modules=modules) for repeat_class, modules in found)


def outermost(graph: ModelGraph, modules: AbstractSet[str]) -> list[str]:
    """Those of the modules that stand in no other one of them, in pre-order."""
    tree = Tree.of(graph)
    return [fqn for fqn in tree.nodes if fqn in modules and modules.isdisjoint(tree.above(fqn))]


def siblings(graph: ModelGraph) -> dict[tuple[str, str], tuple[str, ...]]:
    """Modules with a forward and parameters by (parent whose children are compared, digest), in pre-order."""
    tree = Tree.of(graph)
    groups: dict[tuple[str, str], list[str]] = {}
    for node in graph.modules:
        if node.fqn and node.has_forward and tree.keys(node.fqn):
            groups.setdefault((_anchor(tree, node.fqn), node.repeat_class), []).append(node.fqn)
    return {key: tuple(modules) for key, modules in groups.items()}


def _anchor(tree: Tree, fqn: str) -> str:
    """The parent whose children are compared: the outermost of the containers without forward that hold it."""
    anchor = tree.nodes[fqn].parent
    while anchor:
        outer = tree.nodes[anchor].parent
        if tree.nodes[anchor].has_forward or tree.nodes[outer].has_forward:
            break
        anchor = outer
    return anchor
