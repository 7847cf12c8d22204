"""What is alive and how late each stream is: the state of the fold, and what stays the same over a step."""

from dataclasses import dataclass

import msgspec

from autoshard.cost import Group
from autoshard.simulate.event import Phase
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
    SHARDED_PARAMS,
    UNSHARDED_PARAMS,
    SHARDED_GRADS,
    UNSHARDED_GRADS,
    OPTIMIZER_STATE,
    ACTIVATIONS,
    ALL_GATHER,
    REDUCE_SCATTER,
    TEMPORARIES,
    INPUTS,
    BUFFERS,
) = range(len(KINDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What stays the same over a step.

    Attributes:
        profile: the step on one device.
        units: sizes of the plan's units.
        gradient_bytes: whole gradients by parameter key.
        averaged_bytes: gradients of replicated parameters that one reduction averages, by dtype.
        replicated_bytes: bytes of the parameters that no unit shards.
        mesh_groups: groups over which gradients of replicated parameters are averaged, by mesh axis.
        num_replicas: size of the replicate axis.
        optimizer: state and temporaries.
        unit_host_ns: host time of a unit's hooks in one direction.
        is_serial: nothing overlaps.
        frees_gradients: ``zero_grad`` frees the gradients; otherwise it fills them with zeros.
        left_gradient_bytes: gradients at the end of a step: shards, and whole ones of replicated parameters.
        clip_bytes: temporaries of clipping the gradients.
    """

    profile: StepProfile
    units: tuple[UnitSizes, ...]
    gradient_bytes: dict[str, int]
    averaged_bytes: dict[str, int]
    replicated_bytes: int
    mesh_groups: tuple[Group, ...]
    num_replicas: int
    optimizer: OptimizerSizes
    unit_host_ns: int
    is_serial: bool = False
    frees_gradients: bool = True
    left_gradient_bytes: tuple[int, int] = (0, 0)
    clip_bytes: int = 0


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


class Draft(msgspec.Struct, gc=False):
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


def start(setup: Setup, *, has_state: bool = True, has_gradients: bool = False) -> State:
    """The device as a step starts: shards, optimizer state, buffers, inputs and what FSDP2 casts them to.

    Args:
        setup: of the step.
        has_state: the optimizer made its state in a step before.
        has_gradients: the gradients of the step before are there, filled with zeros.
    """
    live = [0] * len(KINDS)
    live[SHARDED_PARAMS] = sum(unit.sharded_bytes for unit in setup.units)
    live[UNSHARDED_PARAMS] = setup.replicated_bytes
    live[OPTIMIZER_STATE] = setup.optimizer.state_bytes if has_state else 0
    if has_gradients:
        live[SHARDED_GRADS], live[UNSHARDED_GRADS] = setup.left_gradient_bytes
    live[ACTIVATIONS] = setup.profile.between[0]
    live[INPUTS] = setup.profile.input_bytes
    live[BUFFERS] = setup.profile.buffer_bytes
    return State(live=tuple(live), high=sum(live), high_live=tuple(live))


def thaw(state: State) -> Draft:
    """A draft that begins where a state ends."""
    total = sum(state.live)
    return Draft(
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


def freeze(draft: Draft) -> State:
    """The state that a draft has become."""
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
