"""What the legality rules look at: one graph, indexed once."""

from dataclasses import dataclass

from autoshard.analysis.on_demand import on_demand
from autoshard.analysis.order import Run, execution_order, runs
from autoshard.analysis.repeats import repeated_blocks
from autoshard.analysis.space import Block
from autoshard.analysis.updates import sharded_updates
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
        shared: FQNs of the modules with parameters that stand under two or more parents.
        on_demand: modules that may run on some ranks only, with the sign of it.
        updates: by parameter key, modules whose own code uses the parameter sharded (``analysis.updates``).
    """

    graph: ModelGraph
    tree: Tree
    num_shards: int
    runs: dict[str, tuple[Run, ...]]
    order: tuple[str, ...]
    blocks: tuple[Block, ...]
    shared: tuple[str, ...]
    on_demand: dict[str, str]
    updates: dict[str, frozenset[str]]


def gather_facts(graph: ModelGraph, num_shards: int) -> Facts:
    """The facts of a graph."""
    by_module: dict[str, list[Run]] = {}
    for run in runs(graph):
        by_module.setdefault(run.module, []).append(run)
    tree = Tree.of(graph)
    return Facts(
        graph=graph,
        tree=tree,
        num_shards=num_shards,
        runs={fqn: tuple(found) for fqn, found in by_module.items()},
        order=execution_order(graph),
        blocks=repeated_blocks(graph),
        shared=tuple(fqn for fqn in tree.nodes if len(tree.parents[fqn]) > 1 and tree.keys(fqn)),
        on_demand=on_demand(graph),
        updates=sharded_updates(graph),
    )
