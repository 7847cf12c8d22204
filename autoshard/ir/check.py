"""The invariants of a graph. ``check`` returns every violation at once; an empty answer means that the graph is sound.

Run after capture and by tests after every stage: a violation is a bug of autoshard, never of the user's model.
"""

from collections.abc import Iterable, Iterator

from autoshard.ir.graph import LOSS, ModelGraph, ModuleNode, ModuleSpan, Moment, OpNode, ParamInfo, Region, StorageInfo


def check(graph: ModelGraph) -> tuple[str, ...]:
    """All violated invariants, one sentence each, in the order of the graph."""
    return (
        *_modules(graph),
        *_params(graph),
        *_regions(graph),
    )


def _repeated(kind: str, names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"{kind} {name!r} is listed twice"
        seen.add(name)


def _modules(graph: ModelGraph) -> Iterator[str]:
    if not graph.modules or graph.modules[0].fqn != "":
        yield "the first module is not the root"
    yield from _repeated("module", (name for node in graph.modules for name in (node.fqn, *node.aliases)))
    yield from _repeated("buffer", (buffer.name for buffer in graph.buffers))
    nodes = {node.fqn: node for node in graph.modules}
    params = {param.key: param for param in graph.params}
    buffers = {buffer.name for buffer in graph.buffers}
    for node in graph.modules:
        yield from _tree_links(node, nodes)
        for key in node.own_params:
            if key not in params:
                yield f"module {node.fqn!r} registers {key!r}, which is no parameter key"
            elif node.fqn not in params[key].holders:
                yield f"module {node.fqn!r} registers {key!r} but is not among its holders"
        yield from (
            f"module {node.fqn!r} registers {name!r}, which is no buffer"
            for name in node.own_buffers
            if name not in buffers
        )
        if node.num_calls < 0:
            yield f"module {node.fqn!r} was called {node.num_calls} times"
        if node.traits != tuple(sorted(set(node.traits))):
            yield f"traits of module {node.fqn!r} are not sorted"
    reached = {""} | {child for node in graph.modules for child in node.children}
    yield from (f"module {node.fqn!r} is no module's child" for node in graph.modules if node.fqn not in reached)


def _tree_links(node: ModuleNode, nodes: dict[str, ModuleNode]) -> Iterator[str]:
    if node.fqn == "" and node.parent != "":
        yield f"the root's parent is {node.parent!r}"
    if node.parent not in nodes:
        yield f"parent {node.parent!r} of module {node.fqn!r} does not exist"
    elif node.fqn and node.fqn not in nodes[node.parent].children:
        yield f"module {node.fqn!r} is not among the children of its parent {node.parent!r}"
    elif node.fqn and node.fqn.rpartition(".")[0] != node.parent and not _is_path_below(node, nodes[node.parent]):
        yield f"module {node.fqn!r} does not stand below its parent {node.parent!r}"
    for child in node.children:
        if child not in nodes:
            yield f"child {child!r} of module {node.fqn!r} does not exist"
    yield from _repeated(f"in module {node.fqn!r} child", node.children)


def _is_path_below(node: ModuleNode, parent: ModuleNode) -> bool:
    """A child's own name may hold dots only if it was registered so; it still begins with the parent's path."""
    return node.fqn.startswith(f"{parent.fqn}." if parent.fqn else "")


def _params(graph: ModelGraph) -> Iterator[str]:
    nodes = {node.fqn: node for node in graph.modules}
    yield from _repeated("parameter", (name for param in graph.params for name in (param.key, *param.aliases)))
    for param in graph.params:
        if not param.holders:
            yield f"parameter {param.key!r} has no holder"
        for holder in param.holders:
            if holder not in nodes:
                yield f"holder {holder!r} of parameter {param.key!r} does not exist"
            elif param.key not in nodes[holder].own_params:
                yield f"holder {holder!r} of parameter {param.key!r} does not register it"
        yield from (
            f"reader {name!r} of parameter {param.key!r} does not exist"
            for name in dict.fromkeys(name for stack in param.readers for name in stack)
            if name != LOSS and name not in nodes
        )
        yield from _param_values(param)
    if graph.frontend == "trace":
        yield from _gradients(graph)


def _param_values(param: ParamInfo) -> Iterator[str]:
    if param.nbytes < 0 or any(size < 0 for size in param.shape):
        yield f"parameter {param.key!r} has a negative size"
    if param.numel and param.nbytes % param.numel:
        yield f"parameter {param.key!r} has {param.nbytes} bytes for {param.numel} elements"
    if param.gets_grad and not param.requires_grad:
        yield f"parameter {param.key!r} gets a gradient that it does not require"
    if len(set(param.readers)) != len(param.readers):
        yield f"a reader of parameter {param.key!r} is listed twice"
    if any(not stack for stack in param.readers):
        yield f"a reader of parameter {param.key!r} is an empty stack"
    if param.traits != tuple(sorted(set(param.traits))):
        yield f"traits of parameter {param.key!r} are not sorted"


def _gradients(graph: ModelGraph) -> Iterator[str]:
    made = {storage.param for region in graph.regions for storage in region.storages if storage.kind == "gradient"}
    if any(region.calls for region in graph.regions):
        return  # a region names the parameters of its representative only
    for param in graph.params:
        # A sparse gradient has no storage of its own, only those of its indices and values.
        if param.gets_grad != (param.key in made) and "sparse-grad" not in param.traits:
            state = "has" if param.key in made else "has no"
            yield f"parameter {param.key!r} {state} gradient storage but gets_grad is {param.gets_grad}"


def _regions(graph: ModelGraph) -> Iterator[str]:
    if graph.frontend == "trace" and not graph.regions:
        yield "a traced graph has no region"
    yield from _repeated("region", (region.name for region in graph.regions))
    if graph.regions and graph.regions[-1].module != "":
        yield f"the last region describes {graph.regions[-1].module!r}, not the root"
    known: dict[str, Region] = {}
    nodes = {node.fqn: node for node in graph.modules}
    params = {param.key: param for param in graph.params}
    for region in graph.regions:
        where = f"region {region.name!r}: "
        if region.module not in nodes:
            yield f"{where}its module {region.module!r} does not exist"
        yield from (where + text for text in _ops(region, params, nodes))
        yield from (where + text for text in _storages(region, params))
        yield from (where + text for text in _spans(region, nodes))
        yield from (where + text for text in _dtype_reads(region, params, nodes))
        yield from (where + text for text in _calls(region, nodes, known))
        known[region.name] = region
    if graph.regions and not any(region.calls for region in graph.regions):
        yield from _call_counts(graph, nodes)


def _ops(region: Region, params: dict[str, ParamInfo], nodes: dict[str, ModuleNode]) -> Iterator[str]:
    for phase, ops in (("forward", region.forward), ("backward", region.backward)):
        for index, op in enumerate(ops):
            name = f"{phase} op {index} ({op.target})"
            yield from (
                f"{name} {text}" for text in (*_op(op, region, params, nodes), *_order(index, op, phase, region))
            )


def _order(index: int, op: OpNode, phase: str, region: Region) -> Iterator[str]:
    for name in (*op.inputs, *op.outputs):
        if not 0 <= name < len(region.storages):
            continue
        storage = region.storages[name]
        now = (1 if phase == "forward" else 2, index)
        if not _rank(storage.born, last=False) <= now <= _rank(storage.dies, last=True):
            yield f"uses storage {name} outside its life"


def _op(op: OpNode, region: Region, params: dict[str, ParamInfo], nodes: dict[str, ModuleNode]) -> Iterator[str]:
    for storage in (*op.inputs, *op.outputs):
        if not 0 <= storage < len(region.storages):
            yield f"names storage {storage}, of which there is none"
    for key in op.params:
        if key not in params:
            yield f"reads {key!r}, which is no parameter key"
    if op.module != LOSS and op.module not in nodes:
        yield f"ran in {op.module!r}, which is no module"
    if min(op.flops, op.bytes_read, op.bytes_written) < 0:
        yield "has a negative cost"
    if op.is_view and op.bytes_written:
        yield f"is a view and writes {op.bytes_written} bytes"


def _storages(region: Region, params: dict[str, ParamInfo]) -> Iterator[str]:
    for index, storage in enumerate(region.storages):
        yield from (f"storage {index} {text}" for text in _storage(storage, region, params))


def _storage(storage: StorageInfo, region: Region, params: dict[str, ParamInfo]) -> Iterator[str]:
    if storage.nbytes < 0:
        yield f"has {storage.nbytes} bytes"
    for name, moment in (("is born", storage.born), ("dies", storage.dies)):
        if not _is_inside(moment, region):
            yield f"{name} at {moment.phase} {moment.index}, outside the region"
    if _rank(storage.dies, last=True) < _rank(storage.born, last=False):
        yield f"dies at {storage.dies.phase} {storage.dies.index} before it is born"
    if storage.kind == "activation" and (storage.born.phase, storage.dies.phase) != ("forward", "backward"):
        yield f"is an activation but lives from {storage.born.phase} to {storage.dies.phase}"
    if storage.kind in ("input", "buffer") and storage.born.phase != "caller":
        yield f"is an {storage.kind} but is born in the region"
    if storage.kind == "gradient":
        if storage.param not in params:
            yield f"is the gradient of {storage.param!r}, which is no parameter key"
        elif not params[storage.param].requires_grad:
            yield f"is the gradient of {storage.param!r}, which requires none"
    elif storage.param:
        yield f"names parameter {storage.param!r} but is no gradient"


def _is_inside(moment: Moment, region: Region) -> bool:
    if moment.phase == "caller":
        return True
    return 0 <= moment.index < len(region.forward if moment.phase == "forward" else region.backward)


def _rank(moment: Moment, *, last: bool) -> tuple[int, int]:
    phases = {"forward": 1, "backward": 2, "caller": 3 if last else 0}
    return phases[moment.phase], moment.index


def _spans(region: Region, nodes: dict[str, ModuleNode]) -> Iterator[str]:
    open_spans: list[ModuleSpan] = []
    previous = 0
    for span in region.spans:
        name = f"span of {span.module!r}"
        first, end = span.forward
        if span.module not in nodes:
            yield f"{name}: the module does not exist"
        if not 0 <= first <= end <= len(region.forward):
            yield f"{name} covers forward {first}:{end}, outside the region"
        if span.backward is not None and not 0 <= span.backward[0] <= span.backward[1] <= len(region.backward):
            yield f"{name} covers backward {span.backward[0]}:{span.backward[1]}, outside the region"
        if first < previous:
            yield f"{name} starts at {first}, before the span listed before it"
        previous = max(previous, first)
        while open_spans and open_spans[-1].forward[1] <= first:
            open_spans.pop()
        if open_spans and end > open_spans[-1].forward[1]:
            yield f"{name} ends after the span of {open_spans[-1].module!r}, in which it starts"
        open_spans.append(span)


def _dtype_reads(region: Region, params: dict[str, ParamInfo], nodes: dict[str, ModuleNode]) -> Iterator[str]:
    for read in region.dtype_reads:
        name = f"the dtype of {read.param!r} asked in {read.module!r}"
        if read.param not in params:
            yield f"{name}: the parameter does not exist"
        if read.module not in nodes:
            yield f"{name}: the module does not exist"
        for stop in (read.stored_stop, read.cast_stop):
            if not 0 <= read.position <= stop <= len(region.forward):
                yield f"{name} covers forward {read.position}:{stop}, outside the region"
        if min(read.stored_bytes, read.cast_bytes) < 0:
            yield f"{name} has a negative size"


def _calls(region: Region, nodes: dict[str, ModuleNode], known: dict[str, Region]) -> Iterator[str]:
    positions = [call.forward for call in region.calls]
    if positions != sorted(positions):
        yield "its calls are not in forward order"
    for call in region.calls:
        name = f"call of {call.region!r} for {call.module!r}"
        if call.region not in known:
            yield f"{name}: no region of that name stands before this one"
            continue
        if call.module not in nodes:
            yield f"{name}: the module does not exist"
        if not 0 <= call.forward <= len(region.forward):
            yield f"{name} stands at forward {call.forward}, outside the region"
        if call.backward is not None and not 0 <= call.backward <= len(region.backward):
            yield f"{name} stands at backward {call.backward}, outside the region"
        for inner, outer in call.borders:
            if not 0 <= inner < len(known[call.region].storages) or not 0 <= outer < len(region.storages):
                yield f"{name} joins storages {inner} and {outer}, which do not both exist"


def _call_counts(graph: ModelGraph, nodes: dict[str, ModuleNode]) -> Iterator[str]:
    # The region is that of the first inputs; further ones may run a module more often.
    has_other_inputs = any(each.code == "AS103" for each in graph.diagnostics)
    counted: dict[str, int] = {}
    for span in graph.root.spans:
        counted[span.module] = counted.get(span.module, 0) + 1
    for fqn, node in nodes.items():
        num_spans = counted.get(fqn, 0)
        if node.num_calls < num_spans or (node.num_calls > num_spans and not has_other_inputs):
            yield f"module {fqn!r} was called {node.num_calls} times but has {num_spans} spans"
