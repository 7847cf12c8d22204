"""What the legality rules look at: one graph, indexed once."""

from dataclasses import dataclass

from autoshard.analysis.order import Run, execution_order, runs
from autoshard.analysis.repeats import repeated_blocks
from autoshard.analysis.space import Block
from autoshard.ir import ModelGraph
from autoshard.ir.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about one graph, and the question's number of shards.

    Attributes:
        graph: the graph.
        tree: its containment.
        num_shards: size of the shard axis.
        runs: runs of each module, by FQN.
        order: FQNs of the called modules by their first run.
        blocks: runs of isomorphic siblings.
    """

    graph: ModelGraph
    tree: Tree
    num_shards: int
    runs: dict[str, tuple[Run, ...]]
    order: tuple[str, ...]
    blocks: tuple[Block, ...]


def gather_facts(graph: ModelGraph, num_shards: int) -> Facts:
    """The facts of a graph."""
    by_module: dict[str, list[Run]] = {}
    for run in runs(graph):
        by_module.setdefault(run.module, []).append(run)
    return Facts(
        graph=graph,
        tree=Tree.of(graph),
        num_shards=num_shards,
        runs={fqn: tuple(found) for fqn, found in by_module.items()},
        order=execution_order(graph),
        blocks=repeated_blocks(graph),
    )
