"""A piece of the step as it is written down: bytes and clocks of FSDP2's events, relative to where the piece begins.

The rules are those of ``simulate.fold`` event by event. What a piece does not know (the buffer that the unit before
left, the prefetch of the next one, the reduce-scatter's input that is still alive) is marked, and peaks are noted for
each set of marks, so that whoever puts pieces together adds the bytes of their neighbours.
"""

from dataclasses import dataclass, field

import numpy as np

from autoshard.planner.clocks import Clocks
from autoshard.simulate import StepProfile, UnitSizes
from autoshard.simulate.units import Reduction

DEFERRED, AHEAD, INPUT = 1, 2, 4
"""Marks: the last all-gather's buffer in forward, the prefetched one in backward, the reduce-scatter input; of a
neighbour."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What some ops in a row take.

    Attributes:
        compute_ns: device time.
        launch_ns: host time.
        top: most bytes alive during an op, relative to those alive before the first; 0 without ops.
        end: bytes alive after the last, relative to the same.
        is_empty: there are no ops.
    """

    compute_ns: int = 0
    launch_ns: int = 0
    top: int = 0
    end: int = 0
    is_empty: bool = True


class Curve:
    """Bytes and times along the ops of a profile, whole gradients counted from when they appear.

    Attributes:
        profile: the step on one device.
        level: bytes alive at each position, all gradients so far included.
    """

    def __init__(self, profile: StepProfile, gradient_bytes: dict[str, int]) -> None:
        self.profile = profile
        born = np.zeros(profile.num_ops + 1, np.int64)
        for moment in profile.gradients:
            born[moment.born] += gradient_bytes.get(moment.key, 0)
        appeared = np.cumsum(born)
        self.during = np.asarray(profile.during, np.int64) + appeared[:-1]
        self.level = np.asarray(profile.between, np.int64)
        self.level = self.level + np.concatenate(([0], appeared[:-1]))
        self.known: dict[tuple[int, int], Stretch] = {}

    def stretch(self, first: int, stop: int) -> Stretch:
        """The ops between two positions."""
        found = self.known.get((first, stop))
        if found is None:
            found = self.known[first, stop] = self._stretch(first, stop)
        return found

    def _stretch(self, first: int, stop: int) -> Stretch:
        if first >= stop:
            return Stretch()
        profile, start = self.profile, int(self.level[first])
        return Stretch(
            compute_ns=profile.elapsed_ns[stop] - profile.elapsed_ns[first],
            launch_ns=profile.launch_ns * (profile.launched[stop] - profile.launched[first]),
            top=int(self.during[first:stop].max()) - start,
            end=int(self.level[stop]) - start,
            is_empty=False,
        )


@dataclass(slots=True)
class Track:
    """A piece under construction.

    Attributes:
        clocks: so far.
        num_replicas: size of the replicate axis.
        live: bytes alive, relative to the start of the piece.
        marks: what neighbours have alive.
        tops: most bytes alive by marks.
        ops: ops since the last event: device time and host time, ``None`` if there were none.
        deferred_bytes: own buffer that forward has not freed yet.
        input_bytes: own reduce-scatter input that is alive.
    """

    clocks: Clocks
    num_replicas: int
    live: int = 0
    marks: int = 0
    tops: dict[int, int] = field(default_factory=dict)
    ops: tuple[int, int] | None = None
    deferred_bytes: int = 0
    input_bytes: int = 0

    def note(self, above: int = 0) -> None:
        """Bytes are alive at this moment, some more than ``live``."""
        level = self.live + above
        if level > self.tops.get(self.marks, level - 1):
            self.tops[self.marks] = level

    def run(self, stretch: Stretch) -> None:
        """Ops; the clocks move at the next event."""
        if stretch.is_empty:
            return
        self.note(stretch.top)
        self.live += stretch.end
        before = self.ops or (0, 0)
        self.ops = before[0] + stretch.compute_ns, before[1] + stretch.launch_ns

    def split(self) -> None:
        """An event stands here: the ops so far are one launch of work."""
        if self.ops is not None:
            self.clocks.run(*self.ops)
            self.ops = None

    def hook(self, host_ns: int) -> None:
        """Host work of a unit's hooks."""
        self.split()
        self.clocks.hook(host_ns)

    def gather(self, unit: UnitSizes) -> None:
        """An all-gather is issued."""
        self.split()
        self.note(unit.cast_bytes + unit.buffer_bytes)
        self.live += unit.buffer_bytes
        self.clocks.issue(unit.copy_in_ns, unit.gather_ns)

    def copy_out(self, unit: UnitSizes, is_deferred: bool) -> None:
        """It is copied out; in forward its own buffer stays, and the one before goes."""
        self.split()
        self.live += unit.unsharded_bytes
        self.note(unit.transposed_bytes)
        self.clocks.copy_out(unit.copy_out_ns, is_deferred)
        if is_deferred:
            self._free_deferred()
            self.deferred_bytes = unit.buffer_bytes
        else:
            self.live -= unit.buffer_bytes

    def flush(self) -> None:
        """The deferred buffer goes."""
        self.split()
        self.clocks.flush()
        self._free_deferred()

    def _free_deferred(self) -> None:
        self.live -= self.deferred_bytes
        self.deferred_bytes = 0
        self.marks &= ~DEFERRED

    def free(self, unit: UnitSizes) -> None:
        """A unit is resharded."""
        self.split()
        self.live -= unit.unsharded_bytes

    def post_backward(self, unit: UnitSizes, reduction: Reduction | None, is_unsharded: bool = True) -> None:
        """A unit is resharded, the reduce-scatter before it waited for, and its own issued."""
        self.split()
        if reduction is not None:
            self.live += reduction.zeros_bytes
            self.note()
        if is_unsharded:
            self.live -= unit.unsharded_bytes
        self.release()
        if reduction is not None:
            self._reduce(reduction)

    def release(self) -> None:
        """The reduce-scatter input that is alive is waited for and freed."""
        self.clocks.release()
        self.live -= self.input_bytes
        self.input_bytes = 0
        self.marks &= ~INPUT

    def _reduce(self, reduction: Reduction) -> None:
        self.note(reduction.transposed_bytes)
        self.live += reduction.input_bytes
        self.note(reduction.transposed_held_bytes)
        self.live += reduction.held_bytes - reduction.unsharded_bytes + reduction.output_bytes
        self.note()
        if reduction.is_cast:
            self.live += reduction.sharded_bytes
            self.note()
            if self.num_replicas == 1:
                self.live -= reduction.output_bytes
        else:
            self.live += reduction.sharded_bytes - reduction.output_bytes
            self.note()
        self.live -= reduction.held_bytes
        self.input_bytes = reduction.input_bytes
        all_reduce_ns = reduction.all_reduce_ns if self.num_replicas > 1 else None
        self.clocks.reduce(reduction.copy_ns, reduction.reduce_scatter_ns, all_reduce_ns)
