"""The step as a graph of torch, and torch's own export as a second witness of order and edges."""

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import capture, capture_tree, to_fx_graph
from autoshard.ir import LOSS
from tests.models import Stack, build

NAMES = ["stack", "tied", "nested", "giant", "attention", "shared", "functional_head"]


@pytest.mark.parametrize("name", [*NAMES, "checkpointing", "convolutional"])
def test_nodes_and_edges(name: str) -> None:
    model, inputs = build(name)
    graph = capture(model, inputs)
    made = to_fx_graph(graph)
    calls = [node for node in made.nodes if node.op == "call_function"]
    assert [node.meta["target"] for node in calls] == [op.target for op in (*graph.root.forward, *graph.root.backward)]
    assert [str(node.target) for node in calls] == [node.meta["target"] for node in calls]
    assert {node.meta["module"] for node in calls} <= {node.fqn for node in graph.modules} | {LOSS}
    (output,) = (node for node in made.nodes if node.op == "output")
    results = output.args[0]
    assert {key for key in results if not key.startswith("output_")} == {p.key for p in graph.params if p.gets_grad}
    placeholders = {node.target for node in made.nodes if node.op == "placeholder"}
    assert {f"param_{param.key.replace('.', '_')}" for param in graph.params} <= placeholders


def test_an_edge_runs_from_the_last_writer() -> None:
    graph = capture(Stack(1), ((torch.zeros(2, 16),), {}))
    made = to_fx_graph(graph)
    relu = next(node for node in made.nodes if node.meta.get("target") == "aten.relu.default")
    (read,) = relu.all_input_nodes
    assert read.meta["target"] == "aten.addmm.default"
    assert read.meta["module"] == "layers.0.up"
    assert {node.name for node in read.all_input_nodes} >= {"param_layers_0_up_weight", "param_layers_0_up_bias"}


def test_a_tree_has_a_graph_too() -> None:
    made = to_fx_graph(capture_tree(Stack(1)))
    assert [n.meta["module"] for n in made.nodes if n.op == "call_function" and n.meta["phase"] == "forward"] == [
        "layers.0.norm", "layers.0.up", "layers.0.down", "head",
    ]  # fmt: skip


def _exported_modules(node: torch.fx.Node) -> str:
    """FQN of the innermost module of an exported op."""
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    innermost = paths[-1].split("@")[0] if paths else ""
    return str(innermost)


def _export(model: nn.Module, inputs: Any) -> list[torch.fx.Node]:
    exported = torch.export.export(model, *inputs, strict=False)
    return [node for node in exported.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", NAMES)
def test_export_runs_the_modules_in_the_same_order(name: str) -> None:
    model, inputs = build(name)
    order: list[str] = []
    for node in _export(model, inputs):
        fqn = _exported_modules(node)
        if not order or order[-1] != fqn:
            order.append(fqn)
    ours: list[str] = []
    for op in capture(model, inputs).root.forward:
        if op.module != LOSS and (not ours or ours[-1] != op.module):
            ours.append(op.module)
    first = list(dict.fromkeys(order))
    canonical = {alias: node.fqn for node in capture_tree(model).modules for alias in (node.fqn, *node.aliases)}
    assert list(dict.fromkeys(canonical[fqn] for fqn in first)) == list(dict.fromkeys(ours))


@pytest.mark.parametrize("name", ["stack", "tied", "nested", "giant"])
def test_export_has_the_same_edges_between_modules(name: str) -> None:
    """Data flow between different leaf modules, as export's SSA graph and our storages tell it."""
    model, inputs = build(name)
    theirs = set()
    for node in _export(model, inputs):
        for read in node.all_input_nodes:
            if read.op == "call_function":
                theirs.add((_exported_modules(read), _exported_modules(node)))
    ours = set()
    writer: dict[int, str] = {}
    for op in capture(model, inputs).root.forward:
        if op.module == LOSS:
            break
        for storage in op.inputs:
            if storage in writer:
                ours.add((writer[storage], op.module))
        for storage in op.outputs:
            writer[storage] = op.module
    assert {edge for edge in ours if edge[0] != edge[1]} == {edge for edge in theirs if edge[0] != edge[1]}
