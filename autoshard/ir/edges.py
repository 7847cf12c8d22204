"""Edges of a graph as networkx digraphs of names: data flow, containment and ties.

Facts live in the dataclasses; these graphs hold names only, for algorithms on graphs. Not imported by ``autoshard.ir``
itself, so that reading a plan does not load networkx.
"""

from itertools import combinations
from typing import TYPE_CHECKING

import networkx as nx

from autoshard.ir.graph import ModelGraph, Region

if TYPE_CHECKING:
    Names = nx.DiGraph[str]
    Pairs = nx.Graph[str]


def data_flow(region: Region) -> "Names":
    """Which module's ops read what another module's ops made, in the forward of a region.

    Nodes are the modules that ran ops themselves (and ``LOSS``). An op that writes to a storage in place passes it on:
    later readers depend on the last writer.
    """
    flow: Names = nx.DiGraph()
    writer: dict[int, str] = {}
    for op in region.forward:
        flow.add_node(op.module)
        for storage in op.inputs:
            made_by = writer.get(storage)
            if made_by is not None and made_by != op.module:
                flow.add_edge(made_by, op.module)
        for storage in op.outputs:
            writer[storage] = op.module
    return flow


def containment(graph: ModelGraph) -> "Names":
    """Parent → child for every place of every module; a shared module has several parents."""
    tree: Names = nx.DiGraph()
    for node in graph.modules:
        tree.add_node(node.fqn)
        tree.add_edges_from((node.fqn, child) for child in node.children)
    return tree


def ties(graph: ModelGraph) -> "Pairs":
    """An undirected edge between each two modules that register one parameter."""
    tied: Pairs = nx.Graph()
    for param in graph.params:
        tied.add_edges_from(combinations(param.holders, 2))
    return tied
