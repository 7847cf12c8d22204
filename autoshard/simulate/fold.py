"""One training step as a fold: ``advance(setup, state, event) -> state`` over whole bytes and nanoseconds.

The order of allocations and frees within an event is that of FSDP2's own code (torch 2.13,
``torch/distributed/fsdp/_fully_shard``); what is alive at once decides the peak. Clocks follow FSDP2's streams:

- all-gather and reduce-scatter of the shard axis share one communicator, so they queue behind each other;
- shards are copied into an all-gather's buffer on a stream of their own;
- that stream waits for the copy-out of the unit before the one gathered last (forward) or just gathered (backward),
  so some slack carries over units;
- a unit's post-backward makes compute wait for the reduce-scatter before (one input alive at a time);
- the host runs ahead: it never waits for the device, and the device waits where the host is behind.

A device whose profile says ``overlap: none`` has none of this: the host computes, and waits for whatever it issues, so
that there is one clock.

No device has confirmed the clock rules yet; the byte rules are compared with measured runs in tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from autoshard.cost import Group, all_reduce_ns
from autoshard.simulate.event import Event, Phase
from autoshard.simulate.optimizer import OptimizerSizes
from autoshard.simulate.profile import StepProfile
from autoshard.simulate.units import UnitSizes

KINDS = (
    "sharded_params",
    "unsharded_params",
    "sharded_grads",
    "unsharded_grads",
    "optimizer_state",
    "activations",
    "all_gather_buffers",
    "reduce_scatter_buffers",
    "temporaries",
    "inputs",
    "buffers",
)
"""What bytes are, in the order of ``State.live``."""

(
    _SHARDED_PARAMS,
    _UNSHARDED_PARAMS,
    _SHARDED_GRADS,
    _UNSHARDED_GRADS,
    _OPTIMIZER_STATE,
    _ACTIVATIONS,
    _ALL_GATHER,
    _REDUCE_SCATTER,
    _TEMPORARIES,
    _INPUTS,
    _BUFFERS,
) = range(len(KINDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What stays the same over a step.

    Attributes:
        profile: the step on one device.
        units: sizes of the plan's units.
        gradient_bytes: whole gradients by parameter key.
        replicated_bytes: bytes of the parameters that no unit shards.
        mesh_groups: groups over which gradients of replicated parameters are averaged, by mesh axis.
        num_replicas: size of the replicate axis.
        optimizer: state and temporaries.
        unit_host_ns: host time of a unit's hooks in one direction.
        is_serial: nothing overlaps.
    """

    profile: StepProfile
    units: tuple[UnitSizes, ...]
    gradient_bytes: dict[str, int]
    replicated_bytes: int
    mesh_groups: tuple[Group, ...]
    num_replicas: int
    optimizer: OptimizerSizes
    unit_host_ns: int
    is_serial: bool = False


class State(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The device after an event.

    Attributes:
        live: bytes alive by kind, as in ``KINDS``.
        high: most bytes alive at once during the event.
        high_live: what they were, by kind.
        high_op: op during which that was, -1 if it was not an op.
        compute_ns: when the compute stream is free.
        host_ns: when the host has issued everything so far.
        gather_ns: when the copy-in stream is free and may copy shards for the next all-gather.
        shard_ns: when the shard axis's communicator is free.
        replicate_ns: when the replicate axis's is.
        copied_ns: end of the copy-out whose buffer is deferred; the next all-gather but one waits for it.
        deferred_bytes: the all-gather buffer that is kept until the next copy-out is done.
        arrivals: units whose all-gather is in flight, and when it ends.
        inputs: reduce-scatter inputs alive, oldest first: bytes, and when their reduce-scatter ends.
        reduced_ns: when all reductions so far are done.
        exposed_ns: time so far in which compute waited for communication, and not for the host.
    """

    live: tuple[int, ...]
    high: int = 0
    high_live: tuple[int, ...] = ()
    high_op: int = -1
    compute_ns: int = 0
    host_ns: int = 0
    gather_ns: int = 0
    shard_ns: int = 0
    replicate_ns: int = 0
    copied_ns: int = 0
    deferred_bytes: int = 0
    arrivals: tuple[tuple[int, int], ...] = ()
    inputs: tuple[tuple[int, int], ...] = ()
    reduced_ns: int = 0
    exposed_ns: int = 0


class _Draft(msgspec.Struct, gc=False):
    """The state under construction: fields of ``State``, changed in place and frozen at the end."""

    live: list[int]
    total: int
    high: int
    high_live: tuple[int, ...]
    high_op: int
    compute_ns: int
    host_ns: int
    gather_ns: int
    shard_ns: int
    replicate_ns: int
    copied_ns: int
    deferred_bytes: int
    arrivals: dict[int, int]
    inputs: tuple[tuple[int, int], ...]
    reduced_ns: int
    exposed_ns: int

    def add(self, kind: int, num_bytes: int) -> None:
        """Allocate, or free where negative."""
        self.live[kind] += num_bytes
        self.total += num_bytes
        if self.total > self.high:
            self.high, self.high_live, self.high_op = self.total, tuple(self.live), -1

    def wait(self, until_ns: int) -> None:
        """Compute waits for communication; while the host is behind, it would have waited all the same."""
        if until_ns > self.compute_ns:
            self.exposed_ns += max(0, until_ns - max(self.compute_ns, self.host_ns))
            self.compute_ns = until_ns


def start(setup: Setup) -> State:
    """The device as a step starts: shards, optimizer state, buffers, inputs and what FSDP2 casts them to."""
    live = [0] * len(KINDS)
    live[_SHARDED_PARAMS] = sum(unit.sharded_bytes for unit in setup.units)
    live[_UNSHARDED_PARAMS] = setup.replicated_bytes
    live[_OPTIMIZER_STATE] = setup.optimizer.state_bytes
    live[_ACTIVATIONS] = setup.profile.between[0]
    live[_INPUTS] = setup.profile.input_bytes
    live[_BUFFERS] = setup.profile.buffer_bytes
    return State(live=tuple(live), high=sum(live), high_live=tuple(live))


def advance(setup: Setup, state: State, event: Event) -> State:
    """The state after an event."""
    draft = _thaw(state)
    _apply(setup, draft, event)
    return _freeze(draft)


def _apply(setup: Setup, draft: _Draft, event: Event) -> None:
    _RULES[event.kind](setup, draft, event)
    if setup.is_serial:
        _level(draft)


def _level(draft: _Draft) -> None:
    """One clock: all streams are where the last one is; what communication alone took was waited for."""
    busy_ns = max(draft.compute_ns, draft.host_ns, draft.gather_ns)
    latest = max(busy_ns, draft.shard_ns, draft.replicate_ns)
    draft.exposed_ns += latest - busy_ns
    draft.compute_ns = draft.host_ns = draft.gather_ns = draft.shard_ns = draft.replicate_ns = latest


class Summit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A phase of the step in short.

    Attributes:
        phase: of the step.
        high: most bytes alive at once in it.
        high_live: what they were, by kind.
        high_op: op during which that was, -1 if it was not an op.
        event: index of the event during which it was first.
        end_bytes: alive at its end.
    """

    phase: Phase
    high: int
    high_live: tuple[int, ...]
    high_op: int
    event: int
    end_bytes: int


def fold(setup: Setup, first: State, events: Sequence[Event]) -> tuple[tuple[Summit, ...], State]:
    """All events in turn: the summit of each phase in order, and the device after the last event.

    The ``high`` of that state is the last phase's. The rules are those of ``advance``, without the states between.
    """
    draft = _thaw(first)
    summits: list[Summit] = []
    at, phase = 0, events[0].phase if events else "forward"
    for index, event in enumerate(events):
        if event.phase != phase:
            summits.append(_summit(draft, phase, at))
            at, phase = index, event.phase
            draft.high, draft.high_live, draft.high_op = draft.total, tuple(draft.live), -1
        before = draft.high
        _apply(setup, draft, event)
        if draft.high > before:
            at = index
    summits.append(_summit(draft, phase, at))
    return tuple(summits), _freeze(draft)


def _summit(draft: _Draft, phase: Phase, event: int) -> Summit:
    return Summit(
        phase=phase,
        high=draft.high,
        high_live=draft.high_live,
        high_op=draft.high_op,
        event=event,
        end_bytes=draft.total,
    )


def _hook(setup: Setup, draft: _Draft, event: Event) -> None:
    draft.host_ns += setup.unit_host_ns


def _gather(setup: Setup, draft: _Draft, event: Event) -> None:
    """``foreach_all_gather``: with mixed precision a cast copy of the shards lives while the call is issued."""
    unit = setup.units[event.unit]
    end_ns = draft.compute_ns
    if unit.buffer_bytes:
        draft.add(_TEMPORARIES, unit.cast_bytes)
        draft.add(_ALL_GATHER, unit.buffer_bytes)
        draft.add(_TEMPORARIES, -unit.cast_bytes)
        draft.gather_ns = max(draft.gather_ns, draft.host_ns) + unit.copy_in_ns
        end_ns = draft.shard_ns = max(draft.gather_ns, draft.shard_ns) + unit.gather_ns
    draft.arrivals[event.unit] = end_ns


def _copy_out(setup: Setup, draft: _Draft, event: Event) -> None:
    """``wait_for_unshard``: the buffer before is freed only when this copy-out is done."""
    unit = setup.units[event.unit]
    draft.wait(draft.arrivals.pop(event.unit))
    draft.compute_ns += unit.copy_out_ns
    cast_bytes = 0 if unit.buffer_bytes else unit.cast_bytes
    draft.add(_UNSHARDED_PARAMS, unit.unsharded_bytes)
    draft.add(_TEMPORARIES, unit.transposed_bytes + cast_bytes)
    draft.add(_TEMPORARIES, -unit.transposed_bytes - cast_bytes)
    if event.is_deferred and unit.buffer_bytes:
        _flush(setup, draft, event)
        draft.copied_ns, draft.deferred_bytes = draft.compute_ns, unit.buffer_bytes
    else:
        draft.add(_ALL_GATHER, -unit.buffer_bytes)
        draft.gather_ns = max(draft.gather_ns, draft.compute_ns)


def _flush(setup: Setup, draft: _Draft, event: Event) -> None:
    if draft.deferred_bytes:
        draft.gather_ns = max(draft.gather_ns, draft.copied_ns)
        draft.add(_ALL_GATHER, -draft.deferred_bytes)
        draft.deferred_bytes = 0


def _compute(setup: Setup, draft: _Draft, event: Event) -> None:
    profile = setup.profile
    first, stop = event.start, event.stop
    for op, key in event.gradients:
        _note_ops(profile, draft, first, op)
        first = max(first, op)
        num_bytes = setup.gradient_bytes[key]
        # The op that bears a gradient also frees and allocates activations: only the sum during it counts.
        draft.live[_UNSHARDED_GRADS] += num_bytes
        draft.total += num_bytes
    _note_ops(profile, draft, first, stop)
    draft.total += profile.between[stop] - draft.live[_ACTIVATIONS]
    draft.live[_ACTIVATIONS] = profile.between[stop]
    launching_ns = profile.launch_ns * (profile.launched[stop] - profile.launched[event.start])
    draft.compute_ns = max(draft.compute_ns, draft.host_ns) + profile.elapsed_ns[stop] - profile.elapsed_ns[event.start]
    if setup.is_serial:
        draft.compute_ns += launching_ns
    draft.host_ns += launching_ns
    draft.compute_ns = max(draft.compute_ns, draft.host_ns)


def _note_ops(profile: StepProfile, draft: _Draft, first: int, stop: int) -> None:
    if first >= stop:
        return
    during = profile.during[first:stop]
    most = max(during)
    total = draft.total - draft.live[_ACTIVATIONS] + most
    if total > draft.high:
        live = draft.live.copy()
        live[_ACTIVATIONS] = most
        draft.high, draft.high_live, draft.high_op = total, tuple(live), first + during.index(most)


def _reshard(setup: Setup, draft: _Draft, event: Event) -> None:
    if event.reduction is not None:
        draft.add(_UNSHARDED_GRADS, event.reduction.zeros_bytes)
    if event.is_unsharded:
        draft.add(_UNSHARDED_PARAMS, -setup.units[event.unit].unsharded_bytes)


def _release(setup: Setup, draft: _Draft, event: Event) -> None:
    num_bytes, end_ns = draft.inputs[0]
    draft.wait(end_ns)
    draft.inputs = draft.inputs[1:]
    draft.add(_REDUCE_SCATTER, -num_bytes)


def _reduce(setup: Setup, draft: _Draft, event: Event) -> None:
    """``foreach_reduce``: copy in, free the gradients but those still referenced, reduce, cast to the stored dtype."""
    reduction = event.reduction
    assert reduction is not None
    draft.add(_TEMPORARIES, reduction.transposed_bytes)
    draft.add(_TEMPORARIES, reduction.transposed_held_bytes - reduction.transposed_bytes)
    draft.add(_REDUCE_SCATTER, reduction.input_bytes)
    draft.add(_TEMPORARIES, -reduction.transposed_held_bytes)
    draft.add(_UNSHARDED_GRADS, reduction.held_bytes - reduction.unsharded_bytes)
    draft.add(_REDUCE_SCATTER, reduction.output_bytes)
    _reduce_clocks(setup, draft, event)
    if reduction.is_cast:
        draft.add(_SHARDED_GRADS, reduction.sharded_bytes)
        if setup.num_replicas == 1:
            draft.add(_REDUCE_SCATTER, -reduction.output_bytes)
    else:
        draft.add(_REDUCE_SCATTER, -reduction.output_bytes)
        draft.add(_SHARDED_GRADS, reduction.sharded_bytes)
    if event.is_accumulated:
        draft.add(_SHARDED_GRADS, -reduction.sharded_bytes)
    draft.add(_UNSHARDED_GRADS, -reduction.held_bytes)


def _reduce_clocks(setup: Setup, draft: _Draft, event: Event) -> None:
    reduction = event.reduction
    assert reduction is not None
    draft.compute_ns += reduction.copy_ns
    end_ns = max(draft.compute_ns, draft.host_ns)
    if setup.units[event.unit].num_shards > 1:
        end_ns = draft.shard_ns = max(end_ns, draft.shard_ns) + reduction.reduce_scatter_ns
    draft.inputs = (*draft.inputs, (reduction.input_bytes, end_ns))
    if setup.num_replicas > 1:
        end_ns = draft.replicate_ns = max(end_ns, draft.replicate_ns) + reduction.all_reduce_ns
    draft.reduced_ns = max(draft.reduced_ns, end_ns)


def _average(setup: Setup, draft: _Draft, event: Event) -> None:
    """An all-reduce for each axis of the mesh, and compute waits for each."""
    num_bytes = setup.gradient_bytes[event.key]
    for axis, group in enumerate(reversed(setup.mesh_groups)):
        free_ns = draft.shard_ns if axis == 0 else draft.replicate_ns
        end_ns = max(draft.compute_ns, draft.host_ns, free_ns) + all_reduce_ns(num_bytes, group)
        draft.wait(end_ns)
        if axis == 0:
            draft.shard_ns = end_ns
        else:
            draft.replicate_ns = end_ns


def _settle(setup: Setup, draft: _Draft, event: Event) -> None:
    if event.drops_gather:
        draft.wait(draft.arrivals.pop(event.unit))
        draft.add(_ALL_GATHER, -setup.units[event.unit].buffer_bytes)
    if event.reduction is not None:
        draft.add(_REDUCE_SCATTER, -event.reduction.output_bytes)


def _finish(setup: Setup, draft: _Draft, event: Event) -> None:
    draft.wait(draft.reduced_ns)


def _optimizer(setup: Setup, draft: _Draft, event: Event) -> None:
    draft.add(_TEMPORARIES, setup.optimizer.temporary_bytes)
    draft.add(_TEMPORARIES, -setup.optimizer.temporary_bytes)
    draft.compute_ns = max(draft.compute_ns, draft.host_ns) + setup.optimizer.step_ns


def _zero_grad(setup: Setup, draft: _Draft, event: Event) -> None:
    draft.add(_SHARDED_GRADS, -draft.live[_SHARDED_GRADS])
    draft.add(_UNSHARDED_GRADS, -draft.live[_UNSHARDED_GRADS])


_RULES: dict[str, Callable[[Setup, _Draft, Event], None]] = {
    "hook": _hook,
    "gather": _gather,
    "copy out": _copy_out,
    "compute": _compute,
    "reshard": _reshard,
    "flush": _flush,
    "release": _release,
    "reduce": _reduce,
    "average": _average,
    "settle": _settle,
    "finish": _finish,
    "optimizer": _optimizer,
    "zero grad": _zero_grad,
}


def _thaw(state: State) -> _Draft:
    total = sum(state.live)
    return _Draft(
        list(state.live),
        total,
        total,
        state.live,
        -1,
        state.compute_ns,
        state.host_ns,
        state.gather_ns,
        state.shard_ns,
        state.replicate_ns,
        state.copied_ns,
        state.deferred_bytes,
        dict(state.arrivals),
        state.inputs,
        state.reduced_ns,
        state.exposed_ns,
    )


def _freeze(draft: _Draft) -> State:
    return State(
        live=tuple(draft.live),
        high=draft.high,
        high_live=draft.high_live,
        high_op=draft.high_op,
        compute_ns=draft.compute_ns,
        host_ns=draft.host_ns,
        gather_ns=draft.gather_ns,
        shard_ns=draft.shard_ns,
        replicate_ns=draft.replicate_ns,
        copied_ns=draft.copied_ns,
        deferred_bytes=draft.deferred_bytes,
        arrivals=tuple(draft.arrivals.items()),
        inputs=draft.inputs,
        reduced_ns=draft.reduced_ns,
        exposed_ns=draft.exposed_ns,
    )
