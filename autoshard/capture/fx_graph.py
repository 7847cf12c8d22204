"""A captured step as a ``torch.fx.Graph``, for other passes and for viewing.

One node for each op, forward then backward; an edge runs from the op that last wrote a storage to each op that reads
it. The graph is a picture of the step and not a program: arguments that are no tensors are not in it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoshard.ir import ModelGraph, OpNode, Region


def to_fx_graph(graph: ModelGraph) -> fx.Graph:
    """The root region as a graph.

    Inputs, buffers and parameters are placeholders; the output node returns what outlives the step: the loss, and
    gradients by parameter key. Each op's node has in its ``meta``: ``target`` (the op's name as text), ``module`` (FQN,
    or ``(loss)``), ``phase`` (``forward`` or ``backward``), ``nbytes`` (bytes written), ``flops``, ``is_view`` and
    ``is_recompute``.

    Args:
        graph: a captured step, or a module tree (whose ops stand for whole modules).
    """
    made = fx.Graph()
    region = graph.root
    writer = _storages_of_caller(made, region)
    params = {param.key: _placeholder(made, f"param_{param.key}", param.nbytes) for param in graph.params}
    for phase, ops in (("forward", region.forward), ("backward", region.backward)):
        for op in ops:
            node = _node(made, op, phase, writer, params)
            for storage in op.outputs:
                writer[storage] = node
    results: dict[str, fx.Node] = {}
    for index, info in enumerate(region.storages):
        if info.kind in ("output", "gradient") and index in writer:
            results[info.param or f"output_{index}"] = writer[index]
    made.output(results)
    made.lint()
    return made


def module_stand_in(*tensors: Any) -> None:
    """Target of nodes whose op is not an op of torch: the work of a whole module."""


def _storages_of_caller(made: fx.Graph, region: Region) -> dict[int, fx.Node]:
    return {
        index: _placeholder(made, f"{storage.kind}_{index}", storage.nbytes)
        for index, storage in enumerate(region.storages)
        if storage.born.phase == "caller"
    }


def _placeholder(made: fx.Graph, name: str, nbytes: int) -> fx.Node:
    node = made.placeholder(name.replace(".", "_"))
    node.meta.update(phase="caller", nbytes=nbytes, module="", target=name)
    return node


def _node(made: fx.Graph, op: OpNode, phase: str, writer: dict[int, fx.Node], params: dict[str, fx.Node]) -> fx.Node:
    read = [params[key] for key in op.params] + [writer[index] for index in op.inputs if index in writer]
    node = made.call_function(_resolve(op.target), tuple(dict.fromkeys(read)))
    node.meta.update(
        target=op.target,
        module=op.module,
        phase=phase,
        nbytes=op.bytes_written,
        flops=op.flops,
        is_view=op.is_view,
        is_recompute=op.is_recompute,
    )
    return node


def _resolve(target: str) -> Callable[..., Any]:
    """The op of that name, such as ``aten.mm.default``."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
        if found is None:
            return module_stand_in
    return found if isinstance(found, torch._ops.OpOverload) else module_stand_in
