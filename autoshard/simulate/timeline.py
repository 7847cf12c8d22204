"""The recorded fold: what is alive and how late each stream is after every event of a step, and sums over it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec

from autoshard.plan import Projection
from autoshard.request import Question
from autoshard.simulate.event import Event
from autoshard.simulate.fold import advance
from autoshard.simulate.state import KINDS, Setup, State, Summit

_WHAT = {
    "gather": "all-gather buffer",
    "copy out": "copy-out of the all-gather",
    "reshard": "gradients of zeros for unused parameters",
    "reduce": "reduce-scatter input",
    "optimizer": "temporaries of the step",
}

NORM_BYTES, NORM_DTYPE = 4, "float32"
"""What ``autoshard.clip_grad_norm_`` sums over the shard axis: one number, whatever is sharded."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event and the device after it.

    Attributes:
        event: what happened.
        state: the device after it; ``high`` is the most that was alive during it.
    """

    event: Event
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of the step.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        unit: name of the unit; empty for the replicated parameters together and for clipping.
        phase: ``forward``, ``backward``, or ``optimizer`` for the sum of squares that clipping shares.
        num_bytes: its large buffer: the all-gather's output, the reduce-scatter's input, the all-reduce's buffer.
        dtype: of the buffer.
    """

    kind: str
    unit: str
    phase: str
    num_bytes: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One training step under a plan, event by event.

    Attributes:
        setup: what stays the same over the step.
        start: the device before the step.
        events: the events in order.
        summits: the most that is alive in each phase.
        end: the device after the step.
    """

    setup: Setup
    start: State
    events: tuple[Event, ...]
    summits: tuple[Summit, ...]
    end: State

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Every event with the device after it, folded again: the search needs the summits alone."""
        state, entries = self.start, []
        for event in self.events:
            state = advance(self.setup, state, event)
            entries.append(Entry(event=event, state=state))
        return tuple(entries)

    @cached_property
    def _peak(self) -> Summit:
        return max(self.summits, key=lambda summit: summit.high)

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at once over the step."""
        return self._peak.high

    @property
    def by_kind(self) -> dict[str, int]:
        """What the peak is made of, kinds without bytes left out."""
        return {kind: size for kind, size in zip(KINDS, self._peak.high_live, strict=True) if size}

    @property
    def peak_unit(self) -> str:
        """Name of the unit at whose event the peak stands, of the module whose op it is, or of the optimizer."""
        event = self.events[self._peak.event]
        if event.kind == "compute" and self._peak.high_op >= 0:
            return self.setup.profile.labels[self._peak.high_op][0]
        return self.unit_name(event) or event.phase

    @property
    def peak_at(self) -> str:
        """Where the peak stands: phase, unit or module, and what happens there."""
        return self.describe(self.events[self._peak.event], self._peak.high_op)

    @property
    def steady_bytes(self) -> int:
        """Alive between steps: parameters, optimizer state and buffers, without the inputs."""
        return sum(
            size for kind, size in zip(KINDS, self.start.live, strict=True) if kind not in ("inputs", "activations")
        )

    @property
    def step_ns(self) -> int:
        """Time of the step."""
        return max(self.end.compute_ns, self.end.host_ns)

    @property
    def exposed_ns(self) -> int:
        """Part of it in which compute waits for communication."""
        return self.end.exposed_ns

    def phase_peak_bytes(self, phase: str) -> int:
        """The most that is alive at once during ``forward``, ``backward`` or ``optimizer``."""
        return max(summit.high for summit in self.summits if summit.phase == phase)

    def phase_end_bytes(self, phase: str) -> int:
        """What is alive after the last event of a phase."""
        return [summit for summit in self.summits if summit.phase == phase][-1].end_bytes

    def unit_name(self, event: Event) -> str:
        """Name of an event's unit, empty if it has none."""
        return self.setup.units[event.unit].name if event.unit >= 0 else ""

    def describe(self, event: Event, high_op: int) -> str:
        """Phase, unit and what happens at an event, for people."""
        if event.kind == "compute":
            module, target = self.setup.profile.labels[high_op if high_op >= 0 else event.start]
            return f"{event.phase}, {module}: {target}"
        what = _WHAT.get(event.kind, event.kind)
        if event.kind == "reshard" and (event.reduction is None or not event.reduction.zeros_bytes):
            what = "its parameters are freed"
        name = self.unit_name(event)
        return f"{event.phase}, unit {name}: {what}" if name else f"{event.phase}: {what}"

    def collectives(self) -> Iterator[Collective]:
        """The collectives of the step in the order in which they are issued."""
        for event in self.events:
            unit = self.setup.units[event.unit] if event.unit >= 0 else None
            if event.kind == "gather" and unit is not None and unit.buffer_bytes:
                yield _collective("all_gather", unit.name, event, unit.buffer_bytes, unit.gather_dtype)
            elif event.kind == "reduce" and unit is not None and event.reduction is not None:
                reduction = event.reduction
                if unit.num_shards > 1:
                    yield _collective("reduce_scatter", unit.name, event, reduction.input_bytes, reduction.dtype)
                if self.setup.num_replicas > 1:
                    yield _collective("all_reduce", unit.name, event, reduction.output_bytes, reduction.dtype)
            elif event.kind == "average":
                for _ in self.setup.mesh_groups:
                    yield _collective("all_reduce", "", event, self.setup.averaged_bytes[event.key], event.key)
            elif event.kind == "clip" and any(other.kind == "reduce" for other in self.events):
                yield _collective("all_reduce", "", event, NORM_BYTES, NORM_DTYPE)

    def projection(self, question: Question) -> Projection:
        """What the plan says of its costs."""
        found = tuple(self.collectives())
        count = {kind: 0 for kind in ("all_gather", "reduce_scatter", "all_reduce")}
        size = dict(count)
        for collective in found:
            count[collective.kind] += 1
            size[collective.kind] += collective.num_bytes
        return Projection(
            allowed_bytes=question.allowed_bytes,
            peak_bytes=self.peak_bytes,
            steady_bytes=self.steady_bytes,
            by_kind=self.by_kind,
            peak_at=self.peak_at,
            step_ns=self.step_ns,
            exposed_ns=self.exposed_ns,
            num_all_gathers=count["all_gather"],
            num_reduce_scatters=count["reduce_scatter"],
            num_all_reduces=count["all_reduce"],
            all_gather_bytes=size["all_gather"],
            reduce_scatter_bytes=size["reduce_scatter"],
            all_reduce_bytes=size["all_reduce"],
            not_modelled=(),
        )


def _collective(kind: str, unit: str, event: Event, num_bytes: int, dtype: str) -> Collective:
    return Collective(kind=kind, unit=unit, phase=event.phase, num_bytes=num_bytes, dtype=dtype)
