"""Analysis: from a graph to the facts about it and the space of its legal plans. Imports no torch.

``analyze`` is the stage's entry. Each analysis is one pure function in a file of its own.
"""

from autoshard.analysis.access import outside_reads
from autoshard.analysis.facts import gather_facts
from autoshard.analysis.legality import legal_space
from autoshard.analysis.liveness import module_memory
from autoshard.analysis.space import Analysis, Atom, Block, LegalSpace, ModuleMemory
from autoshard.analysis.ties import tied_parameters
from autoshard.ir import ModelGraph

__all__ = ["Analysis", "Atom", "Block", "LegalSpace", "ModuleMemory", "analyze"]


def analyze(graph: ModelGraph, *, num_shards: int, methods: tuple[tuple[str, str], ...] = ()) -> Analysis:
    """All facts about a graph that planning needs.

    Findings of severity ``error`` in ``space.diagnostics`` mean that no plan is legal; the planner refuses on them.

    Args:
        graph: a consistent graph.
        num_shards: size of the shard axis; it decides along which dim small parameters are sharded.
        methods: ``(module, method)`` pairs that the user wants registered as forward methods.
    """
    facts = gather_facts(graph, num_shards)
    return Analysis(
        order=facts.order,
        post_order=facts.tree.post_order,
        ties=tied_parameters(graph),
        outside_reads=outside_reads(graph),
        memory=module_memory(graph),
        blocks=facts.blocks,
        space=legal_space(facts, methods),
    )
