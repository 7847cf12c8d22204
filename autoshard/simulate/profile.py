"""What a step does on one device, whatever is sharded: activations and time along its ops, gradients, hook points.

Made once for a graph and a device and passed to every replay. The ops are numbered through, forward then backward;
position ``p`` lies between the ops ``p - 1`` and ``p``. The whole gradients of parameters are not part of the curve:
under FSDP2 they are freed when they are reduced, so the fold makes them itself from the moments noted here.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autoshard.cost import op_ns, rates
from autoshard.errors import GraphError
from autoshard.hardware import DeviceProfile
from autoshard.ir import CALLER, LOSS, ModelGraph, ModuleSpan, Moment, OpNode
from autoshard.ir.tree import Tree
from autoshard.request import DTYPE_BYTES, Question
from autoshard.simulate.recompute import recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMoment:
    """When a parameter's whole gradient appears.

    Attributes:
        key: the parameter.
        born: op that allocates it.
        complete: last op that writes to it; only then autograd hands it to the parameter.
        handed: last op that reads or writes it, views too: after it autograd has handed it to the parameter.
    """

    key: str
    born: int
    complete: int
    handed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRun:
    """One run of a module's hooked forward, as positions.

    Attributes:
        rank: place among all runs: by start, outer before inner.
        forward: first and past-the-end position.
        backward: the same for its backward ops; ``None`` if it has none.
        inputs_need_grad: FSDP2 can hook its inputs.
        output_needs_grad: FSDP2 can hook its output.
    """

    rank: int
    forward: tuple[int, int]
    backward: tuple[int, int] | None
    inputs_need_grad: bool
    output_needs_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """A step on one device without any sharding.

    Attributes:
        num_forward: forward ops; backward ops are numbered after them.
        during: bytes of activations alive during each op.
        between: bytes of activations alive at each position.
        elapsed_ns: device time of all ops before each position.
        launched: kernels launched before each position.
        labels: module and target of each op, for people.
        gradients: when gradients appear, in the order of ``born``.
        runs: by module FQN, in the order of their start.
        replays: by module FQN, where its forward runs again during backward, as positions: (first, past-the-end).
        input_bytes: the example inputs.
        buffer_bytes: the model's buffers.
        launch_ns: host time of one kernel.
        recompute: the modules that recompute, beside those that do so by themselves.
        recompute_ns: device time of the ops that run forward code again.
    """

    num_forward: int
    during: tuple[int, ...]
    between: tuple[int, ...]
    elapsed_ns: tuple[int, ...]
    launched: tuple[int, ...]
    labels: tuple[tuple[str, str], ...]
    gradients: tuple[GradientMoment, ...]
    runs: dict[str, tuple[ModuleRun, ...]]
    replays: dict[str, tuple[tuple[int, int], ...]]
    input_bytes: int
    buffer_bytes: int
    launch_ns: int
    recompute: tuple[str, ...] = ()
    recompute_ns: int = 0

    @property
    def num_ops(self) -> int:
        """Ops of the whole step."""
        return len(self.during)

    @property
    def compute_ns(self) -> int:
        """Device time of all ops: no plan computes less."""
        return self.elapsed_ns[-1]


def profile_step(graph: ModelGraph, question: Question, recompute: Sequence[str] = ()) -> StepProfile:
    """Profile of a graph on the question's device; the last few are kept.

    Args:
        graph: a captured step.
        question: for the device.
        recompute: FQNs of modules that recompute their activations in backward.

    Raises:
        GraphError: the graph has no step (it was made from the module tree alone), or calls regions.
        RequestError: such a module cannot recompute.
    """
    modules = tuple(recompute)
    for known, device, profile in _RECENT:
        if known is graph and device == question.profile and profile.recompute == modules:
            return profile
    profile = _profile(graph, question, modules)
    _RECENT.append((graph, question.profile, profile))
    return profile


_RECENT: deque[tuple[ModelGraph, DeviceProfile, StepProfile]] = deque(maxlen=8)


def _profile(graph: ModelGraph, question: Question, recompute: tuple[str, ...]) -> StepProfile:
    if not graph.regions:
        raise GraphError(("a graph without ops (frontend tree) has no step to simulate",))
    root = graph.root
    if root.calls:
        raise GraphError((f"the root region calls {len(root.calls)} regions; the profile reads flat regions",))
    graph = recomputed(graph, recompute)
    root = graph.root
    num_forward = len(root.forward)
    ops = (*root.forward, *root.backward)
    reached = rates(question.profile, graph.compute_dtype)
    during, between, gradients = _storages(graph, num_forward, ops)
    runs: dict[str, list[ModuleRun]] = defaultdict(list)
    blocks = _recompute_blocks(root.backward)
    for rank, span in enumerate(root.spans):
        backward = None
        if span.backward is not None and span.backward[0] < span.backward[1]:
            first = _backward_start(graph, span, blocks)
            backward = (num_forward + first, num_forward + span.backward[1])
        runs[span.module].append(
            ModuleRun(
                rank=rank,
                forward=span.forward,
                backward=backward,
                inputs_need_grad=span.inputs_need_grad,
                output_needs_grad=span.output_needs_grad,
            )
        )
    return StepProfile(
        num_forward=num_forward,
        during=during,
        between=between,
        elapsed_ns=(0, *accumulate(op_ns(op, reached) for op in ops)),
        launched=(0, *accumulate(0 if op.is_view else 1 for op in ops)),
        labels=tuple(("the loss" if op.module == LOSS else op.module or "(root)", op.target) for op in ops),
        gradients=gradients,
        runs={module: tuple(found) for module, found in runs.items()},
        replays=_replays(graph, num_forward, blocks, recompute),
        input_bytes=_input_bytes(graph),
        buffer_bytes=sum(buffer.nbytes for buffer in graph.buffers),
        launch_ns=reached.launch_ns,
        recompute=recompute,
        recompute_ns=sum(op_ns(op, reached) for op in root.backward if op.is_recompute),
    )


def _recompute_blocks(ops: tuple[OpNode, ...]) -> list[tuple[int, int]]:
    """Stretches of backward ops that run forward code again: (first, past-the-end)."""
    blocks: list[tuple[int, int]] = []
    for index, op in enumerate(ops):
        if op.is_recompute and blocks and blocks[-1][1] == index:
            blocks[-1] = (blocks[-1][0], index + 1)
        elif op.is_recompute:
            blocks.append((index, index + 1))
    return blocks


def _backward_start(graph: ModelGraph, span: ModuleSpan, blocks: list[tuple[int, int]]) -> int:
    """Where the gradient of a module's output arrives: before its first op that is not recomputed.

    If that op asked for the recomputation, the gradient was there before it.
    """
    assert span.backward is not None
    first, stop = span.backward
    if not blocks:
        return first
    tree, ops = Tree.of(graph), graph.root.backward
    for index in range(first, stop):
        module = ops[index].module
        if not ops[index].is_recompute and module in tree.nodes and tree.is_inside(module, span.module):
            return next((start for start, end in blocks if end == index), index)
    return first


def _replays(
    graph: ModelGraph, num_forward: int, blocks: list[tuple[int, int]], recompute: tuple[str, ...]
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Where forwards run again: those of recomputing modules and of all inside, never of what contains them."""
    tree = Tree.of(graph)
    outermost = {node.fqn for node in graph.modules if "checkpointed" in node.traits}
    outermost |= {tree.canonical(fqn) or fqn for fqn in recompute}
    again = frozenset().union(*(tree.below(fqn) for fqn in outermost))
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for start, stop in blocks:
        within: dict[str, tuple[int, int]] = {}
        for index in range(start, stop):
            module = graph.root.backward[index].module
            if module not in tree.nodes:
                continue
            for fqn in again.intersection((module, *tree.above(module))):
                within[fqn] = (within.get(fqn, (num_forward + index, 0))[0], num_forward + index + 1)
        for fqn, positions in within.items():
            found[fqn].append(positions)
    return {fqn: tuple(positions) for fqn, positions in found.items()}


def alive_activations(graph: ModelGraph, *, op: int = -1, position: int = 0) -> Iterator[tuple[str, int]]:
    """Module whose op made it (empty for copies of inputs) and bytes of each activation alive at a moment of the step.

    Args:
        graph: one flat region, in which recomputation stands already.
        op: the op during which they are alive, -1 for none.
        position: the position at which they are alive where there is no op.
    """
    num_forward = len(graph.root.forward)
    ops = (*graph.root.forward, *graph.root.backward)
    for nbytes, first, last in _lifetimes(graph, num_forward, ops):
        if first <= op <= last if op >= 0 else first < position <= last:
            yield ops[first].module, nbytes
    for nbytes, last in _cast_inputs(graph, num_forward, ops):
        if (op if op >= 0 else position) <= last:
            yield "", nbytes


def _lifetimes(
    graph: ModelGraph, num_forward: int, ops: tuple[OpNode, ...], kept: dict[str, tuple[int, int]] | None = None
) -> Iterator[tuple[int, int, int]]:
    """Bytes, first and last op of all that counts as activation; whole gradients go to ``kept``: (first op, index)."""
    kept = {} if kept is None else kept
    for index, storage in enumerate(graph.root.storages):
        if storage.kind in ("input", "buffer"):
            continue
        first = _op_index(storage.born, num_forward, 0)
        # A gradient that autograd adds to another one dies in the region: it is a temporary like any other.
        if storage.kind == "gradient" and storage.dies == CALLER and storage.param not in kept:
            kept[storage.param] = first, index
            continue
        yield storage.nbytes, first, _op_index(storage.dies, num_forward, len(ops))


def _storages(
    graph: ModelGraph, num_forward: int, ops: tuple[OpNode, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[GradientMoment, ...]]:
    num_ops = len(ops)
    born, gone, crossing = ([0] * (num_ops + 2) for _ in range(3))
    kept: dict[str, tuple[int, int]] = {}
    for nbytes, first, last in _lifetimes(graph, num_forward, ops, kept):
        born[first] += nbytes
        gone[last + 1] += nbytes
        if last > first:
            crossing[first + 1] += nbytes
            crossing[last + 1] -= nbytes
    for nbytes, last in _cast_inputs(graph, num_forward, ops):
        gone[last + 1] += nbytes
        born[0] += nbytes
        crossing[0] += nbytes
        crossing[last + 1] -= nbytes
    during = accumulate(new - old for new, old in zip(born[:num_ops], gone[:num_ops], strict=True))
    written, touched = _last_uses(graph, num_forward)
    gradients = [
        GradientMoment(
            key=key,
            born=first,
            complete=max(first, written.get(index, first)),
            handed=max(first, touched.get(index, first)),
        )
        for key, (first, index) in kept.items()
    ]
    gradients.sort(key=lambda moment: (moment.born, moment.key))
    return tuple(during), tuple(accumulate(crossing[: num_ops + 1])), tuple(gradients)


def _cast_inputs(graph: ModelGraph, num_forward: int, ops: tuple[OpNode, ...]) -> list[tuple[int, int]]:
    """(bytes, last op) of the copies that FSDP2 makes of floating point inputs in another dtype than the compute dtype.

    The trace was made with inputs in the compute dtype, so a copy lives as its input did there: inputs are listed first
    among the storages, in their order. The root casts them before it runs, each as often as it is passed, and as its
    arguments they are held until its forward returns.
    """
    if graph.compute_dtype == "float32":
        return []
    last_read: dict[int, int] = {}
    for index, op in enumerate(ops):
        last_read.update(dict.fromkeys(op.inputs, index))
    returns = max((span.forward[1] - 1 for span in graph.root.spans if not span.module), default=num_forward - 1)
    given = (index for index, storage in enumerate(graph.root.storages) if storage.kind == "input")
    copies = []
    for tensor in graph.inputs:
        number = -1 if tensor.same_as else next(given, -1)
        if tensor.dtype.startswith(("float", "bfloat")) and tensor.dtype != graph.compute_dtype:
            nbytes = _numel(tensor.shape) * DTYPE_BYTES[graph.compute_dtype]
            copies.append((nbytes, max(returns, last_read.get(number, 0))))
    return copies


def _last_uses(graph: ModelGraph, num_forward: int) -> tuple[dict[int, int], dict[int, int]]:
    """The last op of backward that writes each storage, and the last that touches it."""
    written: dict[int, int] = {}
    touched: dict[int, int] = {}
    for index, op in enumerate(graph.root.backward, num_forward):
        touched.update(dict.fromkeys((*op.inputs, *op.outputs), index))
        if op.bytes_written:
            written.update(dict.fromkeys(op.outputs, index))
    return written, touched


def _op_index(moment: Moment, num_forward: int, at_caller: int) -> int:
    if moment.phase == "caller":
        return at_caller
    return moment.index + (num_forward if moment.phase == "backward" else 0)


def _input_bytes(graph: ModelGraph) -> int:
    return sum(_numel(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in graph.inputs if not tensor.same_as)


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
