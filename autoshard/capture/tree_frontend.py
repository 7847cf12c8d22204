"""``capture_tree``: a ``ModelGraph`` from the module tree alone, without inputs.

Nothing is run, so nothing is known of order, reads and activations. What stands in their place is the assumption that
each module with a forward runs once, in registration order, and that parameters are read by the modules that hold them.
The root region has one op for each module that holds parameters, so that positions exist; its only storages are the
gradients, which backward makes of each parameter that trains: their number and sizes need no run.
"""

from dataclasses import replace

from torch import nn

from autoshard.capture.graph import read_tree
from autoshard.capture.nodes import module_nodes, param_infos
from autoshard.capture.structure import repeat_classes
from autoshard.capture.tree import ModuleTree, buffer_infos, has_forward
from autoshard.errors import Diagnostic
from autoshard.ir import CALLER, ModelGraph, ModuleSpan, Moment, OpNode, Region, StorageInfo

TARGET = "module"
"""Target of the one op that stands for a module's own work."""


def capture_tree(model: nn.Module, entry: str = "forward") -> ModelGraph:
    """Describe a model by its module tree, without running it.

    Args:
        model: the root module, real or on meta; it is not changed.
        entry: name of the root's method that runs the step.

    Raises:
        RequestError: ``model`` is no module, or has no such method.
        CaptureError: a module does not know its shapes yet.
    """
    tree = read_tree(model, entry)
    called = _called(tree)
    readers = {
        key: tuple(dict.fromkeys(_stack(holder, tree, called) for holder in param.holders))
        for key, param in tree.params.items()
    }
    return ModelGraph(
        frontend="tree",
        entry=entry,
        loss="none (planned from the module tree)",
        compute_dtype="float32",
        inputs=(),
        modules=module_nodes(tree, repeat_classes(tree), dict.fromkeys(called, 1)),
        params=param_infos(
            tree,
            readers=readers,
            trained=frozenset(key for key, entry in tree.params.items() if entry.param.requires_grad),
        ),
        buffers=buffer_infos(tree),
        regions=(_region(tree, called),),
        diagnostics=(
            Diagnostic(
                code="AS104",
                severity="warning",
                where="(root)",
                message="planned from the module tree alone: that each module runs once and reads only its own "
                "parameters is assumed, and activations are not counted",
                remedy="give example inputs, so that one step can be captured",
            ),
        ),
    )


def _called(tree: ModuleTree) -> list[str]:
    """Modules that are taken to run once: those with a forward, but not what attention reads without calling it."""
    found = []
    for fqn, entry in tree.modules.items():
        is_read = bool(fqn) and isinstance(tree.module(entry.parent), nn.MultiheadAttention)
        if (has_forward(entry.module) and not is_read) or not fqn:
            found.append(fqn)
    return found


def _stack(fqn: str, tree: ModuleTree, called: list[str]) -> tuple[str, ...]:
    path = [fqn]
    while path[-1]:
        path.append(tree.modules[path[-1]].parent)
    running = set(called)
    return tuple(above for above in reversed(path) if above in running)


def _region(tree: ModuleTree, called: list[str]) -> Region:
    """Spans in pre-order, each around the op for its own parameters and the spans below it."""
    ops: list[OpNode] = []
    spans: list[tuple[str, int, int]] = []
    running = set(called)

    def visit(fqn: str) -> None:
        place = len(spans)
        if fqn in running:
            spans.append((fqn, len(ops), 0))
        entry, start = tree.modules[fqn], len(ops)
        if entry.params:
            ops.append(OpNode(target=TARGET, module=fqn, inputs=(), outputs=(), params=tuple(entry.params)))
        for child in entry.children:
            if tree.modules[child].parent == fqn:  # a shared module runs where it stands first
                visit(child)
        if fqn in running:
            spans[place] = (fqn, start, len(ops))

    visit("")
    total = len(ops)
    backward, gradients = _backward(ops, tree)
    return Region(
        name="root",
        module="",
        forward=tuple(ops),
        backward=backward,
        storages=gradients,
        spans=tuple(_span(fqn, start, end, total, tree) for fqn, start, end in spans),
    )


def _backward(ops: list[OpNode], tree: ModuleTree) -> tuple[tuple[OpNode, ...], tuple[StorageInfo, ...]]:
    """The ops in reverse, and the gradients that they write; a tied parameter's is added to by each of its modules."""
    backward: list[OpNode] = []
    gradients: list[StorageInfo] = []
    places: dict[str, int] = {}
    for index, op in enumerate(reversed(ops)):
        written = []
        for key in op.params:
            param = tree.params[key].param
            if not param.requires_grad:
                continue
            if key not in places:
                places[key] = len(gradients)
                born = Moment(phase="backward", index=index)
                nbytes = param.numel() * param.element_size()
                gradients.append(StorageInfo(nbytes=nbytes, born=born, dies=CALLER, kind="gradient", param=key))
            written.append(places[key])
        num_bytes = sum(gradients[place].nbytes for place in written)
        backward.append(replace(op, outputs=tuple(written), bytes_written=num_bytes))
    return tuple(backward), tuple(gradients)


def _span(fqn: str, start: int, end: int, total: int, tree: ModuleTree) -> ModuleSpan:
    first_trained = _first_trained(tree)
    needs_grad = first_trained is not None and bool(fqn)
    return ModuleSpan(
        module=fqn,
        forward=(start, end),
        backward=(total - end, total - start) if end > start else None,
        inputs_need_grad=needs_grad,
        output_needs_grad=first_trained is not None,
        output_kind="tensor",
    )


def _first_trained(tree: ModuleTree) -> str | None:
    return next((key for key, entry in tree.params.items() if entry.param.requires_grad), None)
