"""A graph as stable text, for ``--dump ir`` and for golden tests.

The module tree is written out, one line a module. Ops are summed by module: their list is long, and what matters of it
is how much of what ran where.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.ir.graph import LOSS, ModelGraph, ModuleNode, ModuleSpan, OpNode, Outline, ParamInfo, Region
from autoshard.ir.tree import Tree


def format_graph(graph: ModelGraph) -> str:
    """The text of a graph: head, tree, parameters, regions. Ends with a newline."""
    inputs = ", ".join(f"{each.name} {each.dtype}{_shape(each.shape)}" for each in graph.inputs)
    lines = [
        f"graph by {graph.frontend}, entry {graph.entry}, compute dtype {graph.compute_dtype}",
        f"loss: {graph.loss}",
        f"inputs: {inputs or 'none'}",
        *(str(diagnostic) for diagnostic in graph.diagnostics),
        *(_outline(outline) for outline in graph.outlines),
        "",
        f"modules ({len(graph.modules)})",
        *_tree(graph),
        "",
        f"parameters ({len(graph.params)})",
        *(f"  {_param(param)}" for param in graph.params),
    ]
    if graph.buffers:
        lines += ["", f"buffers ({len(graph.buffers)})"]
        lines += [
            f"  {each.name} {each.dtype}{_shape(each.shape)}{'' if each.persistent else ' not persistent'}"
            for each in graph.buffers
        ]
    for region in graph.regions:
        lines += ["", *_region(region)]
    return "\n".join(lines) + "\n"


def _outline(outline: Outline) -> str:
    if outline.reason:
        likes = f" and {outline.num_blocks - 1} like it" if outline.num_blocks > 1 else ""
        return f"traced in full: {_name(outline.module)}{likes}, since {outline.reason}"
    return f"outlined: {outline.num_replayed} of {outline.num_blocks} blocks like {outline.module} from one recording"


def _tree(graph: ModelGraph) -> Iterator[str]:
    depth = {"": 0}
    tree = Tree.of(graph)
    for node in graph.modules:
        if node.fqn:
            depth[node.fqn] = depth[node.parent] + 1
        yield "  " * (depth[node.fqn] + 1) + _module(node, tree)


def _module(node: ModuleNode, tree: Tree) -> str:
    notes = [node.class_name.rpartition(".")[2]]
    notes.append(f"x{node.num_calls}" if node.has_forward else "no forward")
    if node.own_params:
        notes.append(f"own {len(node.own_params)}")
    notes += [f"also {alias}" for alias in node.aliases]
    notes += node.traits
    elsewhere = [child for child in node.children if tree.nodes[child].parent != node.fqn]
    notes += [f"shares {child}" for child in elsewhere]
    return f"{node.fqn or '(root)'} {node.repeat_class}: {', '.join(notes)}"


def _param(param: ParamInfo) -> str:
    notes = ["trains" if param.requires_grad else "frozen"]
    if param.requires_grad and not param.gets_grad:
        notes.append("no gradient")
    notes += [f"also {alias}" for alias in param.aliases]
    if not param.contiguous:
        notes.append("not contiguous")
    notes += param.traits
    notes += [f"kept in {place}" for place in param.kept_in]
    notes += [f"read in {_stack(stack)}" for stack in param.readers if stack[-1] not in param.holders]
    if not param.readers:
        notes.append("never read")
    return f"{param.key} {param.dtype}{_shape(param.shape)}: {', '.join(notes)}"


def _stack(stack: tuple[str, ...]) -> str:
    return " > ".join(module or "(root)" for module in stack)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


@dataclass(slots=True)
class _Sum:
    ops: int = 0
    views: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def add(self, op: OpNode) -> None:
        self.ops += not op.is_view
        self.views += op.is_view
        self.flops += op.flops
        self.bytes_read += op.bytes_read
        self.bytes_written += op.bytes_written

    def __str__(self) -> str:
        return (
            f"ops {self.ops}, views {self.views}, flop {self.flops}, reads {self.bytes_read} B, "
            f"writes {self.bytes_written} B"
        )


def _region(region: Region) -> Iterator[str]:
    yield (
        f"region {region.name} for {region.module or '(root)'}: {len(region.forward)} forward ops, "
        f"{len(region.backward)} backward ops"
    )
    kinds: dict[str, tuple[int, int]] = {}
    for storage in region.storages:
        count, nbytes = kinds.get(storage.kind, (0, 0))
        kinds[storage.kind] = (count + 1, nbytes + storage.nbytes)
    stored = ", ".join(f"{kind} {count} ({nbytes} B)" for kind, (count, nbytes) in sorted(kinds.items()))
    yield f"  storages: {stored or 'none'}"
    for phase, ops in (("forward", region.forward), ("backward", region.backward)):
        sums: dict[str, _Sum] = {}
        for op in ops:
            sums.setdefault(op.module, _Sum()).add(op)
        yield f"  {phase} by module"
        yield from (f"    {_name(module)}: {total}" for module, total in sums.items())
    yield f"  spans ({len(region.spans)})"
    yield from (f"    {_span(span)}" for span in region.spans)
    if region.calls:
        yield f"  calls ({len(region.calls)})"
        for call in region.calls:
            backward = "none" if call.backward is None else str(call.backward)
            yield f"    {call.region} for {call.module} at forward {call.forward}, backward {backward}"


def _name(module: str) -> str:
    return module if module == LOSS else module or "(root)"


def _span(span: ModuleSpan) -> str:
    backward = "none" if span.backward is None else f"{span.backward[0]}:{span.backward[1]}"
    notes = [
        f"forward {span.forward[0]}:{span.forward[1]}",
        f"backward {backward}",
        f"{'grad' if span.inputs_need_grad else 'no grad'} {span.input_bytes} B -> "
        f"{'grad' if span.output_needs_grad else 'no grad'} {span.output_bytes} B {span.output_kind}",
    ]
    if span.output_is_view:
        notes.append("view")
    return f"{_name(span.module)}: {', '.join(notes)}"
