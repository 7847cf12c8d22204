"""What a step does on one device, whatever is sharded: activations and time along its ops, gradients, hook points.

Made once for a graph and a device and passed to every replay. The ops are numbered through, forward then backward;
position ``p`` lies between the ops ``p - 1`` and ``p``. The whole gradients of parameters are not part of the curve:
under FSDP2 they are freed when they are reduced, so the fold makes them itself from the moments noted here.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost import rates
from autoshard.errors import GraphError
from autoshard.ir import ModelGraph
from autoshard.ir.recent import Recent
from autoshard.ir.tree import Tree
from autoshard.request import DTYPE_BYTES, Question
from autoshard.simulate.facts import Facts, counted_storages, facts_of, input_reads
from autoshard.simulate.recompute import Rerun, rerun


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
class Copy:
    """A copy that is made under a plan and not in the captured step; counted in ``during`` and ``between`` already.

    Attributes:
        module: that makes it.
        start: op from which on it is alive.
        stop: past-the-end op.
        num_bytes: its size.
    """

    module: str
    start: int
    stop: int
    num_bytes: int


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
        copies: what a plan adds to the captured activations.
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
    copies: tuple[Copy, ...] = ()

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
    return _RECENT.get(graph, (question.profile, modules), lambda: _profile(graph, question, modules))


_RECENT: Recent[StepProfile] = Recent(8)


def _profile(graph: ModelGraph, question: Question, recompute: tuple[str, ...]) -> StepProfile:
    if not graph.regions:
        raise GraphError(("a graph without ops (frontend tree) has no step to simulate",))
    root = graph.root
    if root.calls:
        raise GraphError((f"the root region calls {len(root.calls)} regions; the profile reads flat regions",))
    again = rerun(graph, recompute)
    num_forward = again.num_forward
    reached = rates(question.profile, graph.compute_dtype)
    facts = facts_of(graph, reached)
    sources = [*range(num_forward), *again.sources]
    modules = [facts.modules[index] for index in again.sources]
    is_again = [index < num_forward or facts.is_recompute[index] for index in again.sources]
    blocks = _recompute_blocks(is_again)
    asked = {stop: start for start, stop in blocks.items()}
    during, between, gradients = _storages(graph, facts, again)
    tree = Tree.of(graph)
    runs: dict[str, list[ModuleRun]] = defaultdict(list)
    for rank, span in enumerate(root.spans):
        backward = again.backward_of(span)
        if backward is not None:
            first, stop = backward
            if blocks:
                first = _backward_start(tree, span.module, backward, is_again, asked, modules)
            backward = (num_forward + first, num_forward + stop) if backward[0] < stop else None
        runs[span.module].append(
            ModuleRun(
                rank=rank,
                forward=span.forward,
                backward=backward,
                inputs_need_grad=span.inputs_need_grad,
                output_needs_grad=span.output_needs_grad,
            )
        )
    costs = facts.costs[sources]
    return StepProfile(
        num_forward=num_forward,
        during=during,
        between=between,
        elapsed_ns=(0, *costs.cumsum().tolist()),
        launched=(0, *facts.launches[sources].cumsum().tolist()),
        labels=tuple([facts.labels[index] for index in sources]),
        gradients=gradients,
        runs={module: tuple(found) for module, found in runs.items()},
        replays=_replays(graph, num_forward, blocks, modules, recompute),
        input_bytes=_input_bytes(graph),
        buffer_bytes=sum(buffer.nbytes for buffer in graph.buffers),
        launch_ns=reached.launch_ns,
        recompute=recompute,
        recompute_ns=int(costs[num_forward:][np.array(is_again, bool)].sum()),
    )


def _recompute_blocks(is_again: Sequence[bool]) -> dict[int, int]:
    """Stretches of backward ops that run forward code again: past-the-end by first."""
    blocks: dict[int, int] = {}
    start = -1
    for index, again in enumerate((*is_again, False)):
        if again and start < 0:
            start = index
        elif not again and start >= 0:
            blocks[start] = index
            start = -1
    return blocks


def _backward_start(
    tree: Tree,
    module: str,
    backward: tuple[int, int],
    is_again: Sequence[bool],
    asked: dict[int, int],
    modules: Sequence[str],
) -> int:
    """Where the gradient of a module's output arrives: before its first op that is not recomputed.

    If that op asked for the recomputation, the gradient was there before it.
    """
    for index in range(*backward):
        if not is_again[index] and modules[index] in tree.nodes and tree.is_inside(modules[index], module):
            return asked.get(index, index)
    return backward[0]


def _replays(
    graph: ModelGraph, num_forward: int, blocks: dict[int, int], modules: Sequence[str], recompute: tuple[str, ...]
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Where forwards run again: those of recomputing modules and of all inside, never of what contains them."""
    tree = Tree.of(graph)
    outermost = {node.fqn for node in graph.modules if "checkpointed" in node.traits}
    outermost |= {tree.canonical(fqn) or fqn for fqn in recompute}
    again = frozenset().union(*(tree.below(fqn) for fqn in outermost))
    runs: dict[str, frozenset[str]] = {}
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for start, stop in blocks.items():
        within: dict[str, tuple[int, int]] = {}
        for index in range(start, stop):
            module = modules[index]
            if module not in runs:
                runs[module] = (
                    again.intersection((module, *tree.above(module))) if module in tree.nodes else frozenset()
                )
            for fqn in runs[module]:
                within[fqn] = (within.get(fqn, (num_forward + index, 0))[0], num_forward + index + 1)
        for fqn, positions in within.items():
            found[fqn].append(positions)
    return {fqn: tuple(positions) for fqn, positions in found.items()}


def alive_activations(
    graph: ModelGraph, recompute: Sequence[str] = (), *, op: int = -1, position: int = 0
) -> Iterator[tuple[str, int]]:
    """Module whose op made it (empty for copies of inputs) and bytes of each activation alive at a moment of the step.

    Args:
        graph: a captured step.
        recompute: FQNs of modules that recompute their activations in backward.
        op: the op of that step during which they are alive, -1 for none.
        position: the position at which they are alive where there is no op.
    """
    again = rerun(graph, recompute)
    root, num_forward = graph.root, again.num_forward
    seconds = again.lives[len(root.storages) :]
    for index, first, last in itertools.chain((again.lives[index] for index in counted_storages(root)[0]), seconds):
        first = max(first, 0)
        if first <= op <= last if op >= 0 else first < position <= last:
            source = first if first < num_forward else again.sources[first - num_forward]
            made = root.forward[source] if source < num_forward else root.backward[source - num_forward]
            yield made.module, root.storages[index].nbytes
    for nbytes, last in _cast_inputs(graph, again, input_reads(root)):
        if (op if op >= 0 else position) <= last:
            yield "", nbytes


def _storages(
    graph: ModelGraph, facts: Facts, again: Rerun
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[GradientMoment, ...]]:
    num_ops = again.num_ops
    num_first = len(graph.root.storages)
    lives = np.array([again.lives[index] for index in facts.counted] + again.lives[num_first:], np.int64).reshape(-1, 3)
    more = [graph.root.storages[index].nbytes for index, _, _ in again.lives[num_first:]]
    nbytes = np.concatenate((facts.nbytes, np.array(more, np.int64)))
    first, after = np.maximum(lives[:, 1], 0), lives[:, 2] + 1
    change, crossing = np.zeros(num_ops + 2, np.int64), np.zeros(num_ops + 2, np.int64)
    np.add.at(change, first, nbytes)
    np.subtract.at(change, after, nbytes)
    crosses = after > first + 1
    np.add.at(crossing, first[crosses] + 1, nbytes[crosses])
    np.subtract.at(crossing, after[crosses], nbytes[crosses])
    for size, last in _cast_inputs(graph, again, facts.input_reads):
        change[0] += size
        crossing[0] += size
        change[last + 1] -= size
        crossing[last + 1] -= size
    gradients = []
    for key, index in facts.gradients.items():
        born = max(again.lives[index][1], 0)
        written, touched = facts.written.get(index), facts.touched.get(index)
        gradients.append(
            GradientMoment(
                key=key,
                born=born,
                complete=born if written is None else max(born, again.place(written)),
                handed=born if touched is None else max(born, again.place(touched)),
            )
        )
    gradients.sort(key=lambda moment: (moment.born, moment.key))
    during, between = change.cumsum()[:num_ops], crossing.cumsum()[: num_ops + 1]
    return tuple(during.tolist()), tuple(between.tolist()), tuple(gradients)


def _cast_inputs(graph: ModelGraph, again: Rerun, reads: dict[int, list[int]]) -> list[tuple[int, int]]:
    """(bytes, last op) of the copies that FSDP2 makes of floating point inputs in another dtype than the compute dtype.

    The trace was made with inputs in the compute dtype, so a copy lives as its input did there: inputs are listed first
    among the storages, in their order. The root casts them before it runs, each as often as it is passed, and as its
    arguments they are held until its forward returns.
    """
    if graph.compute_dtype == "float32":
        return []
    returns = max((span.forward[1] - 1 for span in graph.root.spans if not span.module), default=again.num_forward - 1)
    given = (index for index, storage in enumerate(graph.root.storages) if storage.kind == "input")
    copies = []
    for tensor in graph.inputs:
        number = -1 if tensor.same_as else next(given, -1)
        if tensor.dtype.startswith(("float", "bfloat")) and tensor.dtype != graph.compute_dtype:
            nbytes = _numel(tensor.shape) * DTYPE_BYTES[graph.compute_dtype]
            last = max((place for op in reads.get(number, ()) for place in again.places(op)), default=0)
            copies.append((nbytes, max(returns, last)))
    return copies


def _input_bytes(graph: ModelGraph) -> int:
    return sum(_numel(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in graph.inputs if not tensor.same_as)


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
