"""Which modules are compiled where the request says ``compile=blocks``: each outermost repeated block by itself.

Equal blocks share one compiled graph, and what lies between them (embeddings, the head, the loss) stays as it is, so
that the time of compilation does not grow with the depth of the model. This is how torchtitan compiles.
"""

from autoshard.analysis import Analysis
from autoshard.ir import ModelGraph
from autoshard.ir.tree import Tree

NOT_COMPILED = frozenset({"script"})
"""Traits of modules that are compiled already."""


def compiled_blocks(graph: ModelGraph, analysis: Analysis) -> tuple[str, ...]:
    """FQNs of the outermost repeated blocks, in the order of the tree; ``Analysis.blocks`` names them."""
    tree = Tree.of(graph)
    chosen: set[str] = set()
    for block in analysis.blocks:  # outermost first
        for fqn in block.modules:
            inside = tree.below(fqn)
            if not chosen & {fqn, *tree.above(fqn)} and not any(
                NOT_COMPILED & set(tree.nodes[i].traits) for i in inside
            ):
                chosen.add(fqn)
    return tuple(node.fqn for node in graph.modules if node.fqn in chosen)
