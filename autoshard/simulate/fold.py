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

from msgspec.structs import replace

from autoshard.cost import all_reduce_ns
from autoshard.simulate.event import Event, Phase
from autoshard.simulate.state import (
    ACTIVATIONS,
    ALL_GATHER,
    OPTIMIZER_STATE,
    REDUCE_SCATTER,
    SHARDED_GRADS,
    TEMPORARIES,
    UNSHARDED_GRADS,
    UNSHARDED_PARAMS,
    Draft,
    Setup,
    State,
    Summit,
    freeze,
    thaw,
)


def advance(setup: Setup, state: State, event: Event) -> State:
    """The state after an event."""
    draft = thaw(state)
    _apply(setup, draft, event)
    return freeze(draft)


def _apply(setup: Setup, draft: Draft, event: Event) -> None:
    _RULES[event.kind](setup, draft, event)
    if setup.is_serial:
        _level(draft)


def _level(draft: Draft) -> None:
    """One clock: all streams are where the last one is; what communication alone took was waited for."""
    busy_ns = max(draft.compute_ns, draft.host_ns, draft.gather_ns)
    latest = max(busy_ns, draft.shard_ns, draft.replicate_ns)
    draft.exposed_ns += latest - busy_ns
    draft.compute_ns = draft.host_ns = draft.gather_ns = draft.shard_ns = draft.replicate_ns = latest


def fold(setup: Setup, first: State, events: Sequence[Event]) -> tuple[tuple[Summit, ...], State]:
    """All events in turn: the summit of each phase in order, and the device after the last event.

    The ``high`` of that state is the last phase's. The rules are those of ``advance``, without the states between.
    """
    draft = thaw(first)
    summits: dict[Phase, Summit] = {}
    at, phase = 0, events[0].phase if events else "forward"
    for index, event in enumerate(events):
        if event.phase != phase:
            _climb(summits, _summit(draft, phase, at))
            at, phase = index, event.phase
            draft.high, draft.high_live, draft.high_op = draft.total, tuple(draft.live), -1
        before = draft.high
        _RULES[event.kind](setup, draft, event)
        if setup.is_serial:
            _level(draft)
        if draft.high > before:
            at = index
    _climb(summits, _summit(draft, phase, at))
    return tuple(summits.values()), freeze(draft)


def _climb(summits: dict[Phase, Summit], found: Summit) -> None:
    """The higher one of two of the same phase, which ends where the later one does."""
    before = summits.get(found.phase)
    if before is not None and before.high >= found.high:
        found = replace(before, end_bytes=found.end_bytes)
    summits[found.phase] = found


def _summit(draft: Draft, phase: Phase, event: int) -> Summit:
    return Summit(
        phase=phase,
        high=draft.high,
        high_live=draft.high_live,
        high_op=draft.high_op,
        event=event,
        end_bytes=draft.total,
    )


def _hook(setup: Setup, draft: Draft, event: Event) -> None:
    draft.host_ns += setup.unit_host_ns


def _gather(setup: Setup, draft: Draft, event: Event) -> None:
    """``foreach_all_gather``: with mixed precision a cast copy of the shards lives while the call is issued."""
    unit = setup.units[event.unit]
    end_ns = draft.compute_ns
    if unit.buffer_bytes:
        draft.add(TEMPORARIES, unit.cast_bytes)
        draft.add(ALL_GATHER, unit.buffer_bytes)
        draft.add(TEMPORARIES, -unit.cast_bytes)
        draft.gather_ns = max(draft.gather_ns, draft.host_ns) + unit.copy_in_ns
        end_ns = draft.shard_ns = max(draft.gather_ns, draft.shard_ns) + unit.gather_ns
    draft.arrivals[event.unit] = end_ns


def _copy_out(setup: Setup, draft: Draft, event: Event) -> None:
    """``wait_for_unshard``: the buffer before is freed only when this copy-out is done."""
    unit = setup.units[event.unit]
    draft.wait(draft.arrivals.pop(event.unit))
    draft.compute_ns += unit.copy_out_ns
    cast_bytes = 0 if unit.buffer_bytes else unit.cast_bytes
    draft.add(UNSHARDED_PARAMS, unit.unsharded_bytes)
    draft.add(TEMPORARIES, unit.transposed_bytes + cast_bytes)
    draft.add(TEMPORARIES, -unit.transposed_bytes - cast_bytes)
    if event.is_deferred and unit.buffer_bytes:
        _flush(setup, draft, event)
        draft.copied_ns, draft.deferred_bytes = draft.compute_ns, unit.buffer_bytes
    else:
        draft.add(ALL_GATHER, -unit.buffer_bytes)
        draft.gather_ns = max(draft.gather_ns, draft.compute_ns)


def _flush(setup: Setup, draft: Draft, event: Event) -> None:
    if draft.deferred_bytes:
        draft.gather_ns = max(draft.gather_ns, draft.copied_ns)
        draft.add(ALL_GATHER, -draft.deferred_bytes)
        draft.deferred_bytes = 0


def _compute(setup: Setup, draft: Draft, event: Event) -> None:
    profile = setup.profile
    first, stop = event.start, event.stop
    changes = [(op, setup.gradient_bytes[key]) for op, key in event.gradients]
    if event.merged:
        # What autograd adds to a gradient that is there is gone before the next op.
        changes = sorted([*changes, *((op, -setup.gradient_bytes[key]) for op, key in event.merged)])
    during = profile.during
    others = draft.total - draft.live[ACTIVATIONS]
    # The op that bears a gradient also frees and allocates activations: only the sum during it counts.
    for op, num_bytes in (*changes, (stop, 0)):
        if op > first:
            most = max(during[first:op])
            if others + most > draft.high:
                _climb_to(draft, others, most, first + during[first:op].index(most))
            first = op
        draft.live[UNSHARDED_GRADS] += num_bytes
        others += num_bytes
    draft.live[ACTIVATIONS] = profile.between[stop]
    draft.total = others + profile.between[stop]
    launching_ns = profile.launch_ns * (profile.launched[stop] - profile.launched[event.start])
    draft.compute_ns = max(draft.compute_ns, draft.host_ns) + profile.elapsed_ns[stop] - profile.elapsed_ns[event.start]
    if setup.is_serial:
        draft.compute_ns += launching_ns
    draft.host_ns += launching_ns
    draft.compute_ns = max(draft.compute_ns, draft.host_ns)


def _climb_to(draft: Draft, others: int, activations: int, op: int) -> None:
    live = draft.live.copy()
    live[ACTIVATIONS] = activations
    draft.high, draft.high_live, draft.high_op = others + activations, tuple(live), op


def _reshard(setup: Setup, draft: Draft, event: Event) -> None:
    if event.reduction is not None:
        draft.add(UNSHARDED_GRADS, event.reduction.zeros_bytes)
    if event.is_unsharded:
        draft.add(UNSHARDED_PARAMS, -setup.units[event.unit].unsharded_bytes)


def _release(setup: Setup, draft: Draft, event: Event) -> None:
    num_bytes, end_ns = draft.inputs[0]
    draft.wait(end_ns)
    draft.inputs = draft.inputs[1:]
    draft.add(REDUCE_SCATTER, -num_bytes)


def _reduce(setup: Setup, draft: Draft, event: Event) -> None:
    """``foreach_reduce``: copy in, free the gradients but those still referenced, reduce, cast to the stored dtype."""
    reduction = event.reduction
    assert reduction is not None
    draft.add(TEMPORARIES, reduction.transposed_bytes)
    draft.add(TEMPORARIES, reduction.transposed_held_bytes - reduction.transposed_bytes)
    draft.add(REDUCE_SCATTER, reduction.input_bytes)
    draft.add(TEMPORARIES, -reduction.transposed_held_bytes)
    draft.add(UNSHARDED_GRADS, reduction.held_bytes - reduction.unsharded_bytes)
    draft.add(REDUCE_SCATTER, reduction.output_bytes)
    _reduce_clocks(setup, draft, event)
    # With replicas the all-reduce's buffer is held until the unit is settled, unless it is the shards themselves.
    is_held = setup.num_replicas > 1
    if reduction.is_cast:
        draft.add(SHARDED_GRADS, reduction.sharded_bytes)
        if not is_held:
            draft.add(REDUCE_SCATTER, -reduction.output_bytes)
        if event.is_accumulated:
            draft.add(SHARDED_GRADS, -reduction.sharded_bytes)
    elif not event.is_accumulated:
        draft.add(REDUCE_SCATTER, -reduction.output_bytes)
        draft.add(SHARDED_GRADS, reduction.sharded_bytes)
    elif not is_held:
        draft.add(REDUCE_SCATTER, -reduction.output_bytes)
    draft.add(UNSHARDED_GRADS, -reduction.held_bytes)


def _reduce_clocks(setup: Setup, draft: Draft, event: Event) -> None:
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


def _average(setup: Setup, draft: Draft, event: Event) -> None:
    """An all-reduce for each axis of the mesh, and compute waits for each."""
    num_bytes = setup.averaged_bytes[event.key]
    draft.add(REDUCE_SCATTER, num_bytes)
    for axis, group in enumerate(reversed(setup.mesh_groups)):
        free_ns = draft.shard_ns if axis == 0 else draft.replicate_ns
        end_ns = max(draft.compute_ns, draft.host_ns, free_ns) + all_reduce_ns(num_bytes, group)
        draft.wait(end_ns)
        if axis == 0:
            draft.shard_ns = end_ns
        else:
            draft.replicate_ns = end_ns
    draft.add(REDUCE_SCATTER, -num_bytes)


def _settle(setup: Setup, draft: Draft, event: Event) -> None:
    if event.drops_gather:
        draft.wait(draft.arrivals.pop(event.unit))
        draft.add(ALL_GATHER, -setup.units[event.unit].buffer_bytes)
    if event.reduction is not None:
        draft.add(REDUCE_SCATTER, -event.reduction.output_bytes)


def _finish(setup: Setup, draft: Draft, event: Event) -> None:
    draft.wait(draft.reduced_ns)


def _next_inputs(setup: Setup, draft: Draft, event: Event) -> None:
    draft.add(ACTIVATIONS, setup.profile.between[0] - draft.live[ACTIVATIONS])


def _merge(setup: Setup, draft: Draft, event: Event) -> None:
    draft.add(UNSHARDED_GRADS, -sum(setup.gradient_bytes[key] for key in event.keys))


def _keep(setup: Setup, draft: Draft, event: Event) -> None:
    """Parameter by parameter: the cast copy, then the gradient is freed."""
    gradients = dict(setup.units[event.unit].gradients)
    for key in event.keys:
        draft.add(UNSHARDED_GRADS, gradients[key].kept_bytes)
        draft.add(UNSHARDED_GRADS, -setup.gradient_bytes[key])


def _clip(setup: Setup, draft: Draft, event: Event) -> None:
    draft.add(TEMPORARIES, setup.clip_bytes)
    draft.add(TEMPORARIES, -setup.clip_bytes)


def _optimizer(setup: Setup, draft: Draft, event: Event) -> None:
    draft.add(OPTIMIZER_STATE, setup.optimizer.state_bytes - draft.live[OPTIMIZER_STATE])
    draft.add(TEMPORARIES, setup.optimizer.temporary_bytes)
    draft.add(TEMPORARIES, -setup.optimizer.temporary_bytes)
    draft.compute_ns = max(draft.compute_ns, draft.host_ns) + setup.optimizer.step_ns


def _zero_grad(setup: Setup, draft: Draft, event: Event) -> None:
    if not setup.frees_gradients:
        return
    draft.add(SHARDED_GRADS, -draft.live[SHARDED_GRADS])
    draft.add(UNSHARDED_GRADS, -draft.live[UNSHARDED_GRADS])


_RULES: dict[str, Callable[[Setup, Draft, Event], None]] = {
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
    "next inputs": _next_inputs,
    "merge": _merge,
    "keep": _keep,
    "clip": _clip,
    "optimizer": _optimizer,
    "zero grad": _zero_grad,
}
