"""Lower bounds: what the rest of the chain takes at least, whatever is decided there.

The end of the step is the longest of many paths, so any one path bounds it from below. What the places of a suffix add
to a path on one stream is a sum, and each place chooses how much it keeps: with fewer bytes it is gathered again or
recomputes. A choice also *needs* room: the turn and the backward of each place have to find it beside what the places
before have kept. So for every suffix there is a list, the least time for each room that it is given: a knapsack along
the chain, solved exactly and jointly over recompute and reshard. A label looks up the room that it leaves.

Only room that labels at a border can leave counts: in lists near the start, where little has been kept yet, and near
the end, where little is left to choose, few entries remain.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.planner.clocks import BACKWARD, FORWARD, NEVER
from autoshard.planner.labels import AHEAD, COMPUTE, DUAL, GATHER_NS, HOST, KEPT, PENDING, SHARD
from autoshard.planner.world import Option, World

Column = npt.NDArray[np.int64]

IMPOSSIBLE = 1 << 60
"""Bound of a label from which no plan fits."""

_SHARD_DUAL = DUAL + BACKWARD.index("shard")
_ARRIVAL_DUAL = DUAL + BACKWARD.index("arrival")
_COMPUTE_DUAL = DUAL + BACKWARD.index("compute")
_HOST_DUAL = DUAL + BACKWARD.index("host")
STREAMS = ("compute", "shard", "host")
PATHS = ((0, 0), (2, 0), (1, 1), (2, 2))
"""Streams that a bound follows, in forward and in backward: the host may hold forward up, and the device backward."""


@dataclass(frozen=True, slots=True)
class _Best:
    """Least times by room: both sorted, the times falling."""

    need: Column
    time: Column


Step = tuple[int, int]
"""A piece, by the borders from which to which it reaches."""


class Bounds:
    """Lower bounds of one world under one allowance.

    Where pieces may share units, a piece needs what it does in any of them; alone it needs more.

    Attributes:
        steps: by border: the pieces that begin there, whole or as parts; at the end of the chain the turn.
        input_bytes: by step: reduce-scatter input of the unit that begins with it, at least.
        first_need: by step: room that its backward needs, with the prefetch of what stands before it.
    """

    def __init__(self, world: World, allowed_bytes: int, longest: int) -> None:
        self.world, self.allowed, self.longest, self.is_alone = world, allowed_bytes, longest, longest == 1
        self.last = world.chain.num_borders - 1
        self.options: dict[Step, list[Option]] = {}
        self.steps: list[list[Step]] = [[] for _ in range(self.last + 1)]
        for border in range(self.last):
            for option in world.options(border, 1):
                step = border, border + option.length
                if step not in self.options:
                    self.options[step] = []
                    self.steps[border].append(step)
                self.options[step].append(option)
        self.turn_step = self.last, self.last
        self.steps[self.last].append(self.turn_step)
        self.input_bytes = {step: min(each.input_bytes for each in found) for step, found in self.options.items()}
        self.input_bytes[self.turn_step] = 0
        self.first_need = self._first_needs()
        self.least_kept, self.most_kept = self._kept()
        self.turn = _turn_times(world)
        self.most = [self._most(path) for path in range(len(PATHS))]
        self.lists: list[dict[Step, _Best] | None] = [None] * len(PATHS)

    def __call__(self, border: int, labels: Column) -> Column:
        """Least step time of any plan that continues each label."""
        ahead = labels[:, COMPUTE], labels[:, SHARD], labels[:, HOST]
        behind = labels[:, _COMPUTE_DUAL], _through_prefetch(labels), labels[:, _HOST_DUAL]
        ops = self.world.ops_after[border]
        room = self.allowed - labels[:, KEPT]
        steps = []
        for step in self.steps[border]:
            has_room = self.first_need[step] + labels[:, AHEAD] <= room
            steps.append((step, has_room & (labels[:, PENDING] + self.input_bytes[step] <= self.allowed)))
        found = np.zeros(len(labels), np.int64)
        for path, (one, two) in enumerate(PATHS):
            rest = ahead[one] + behind[two] + (self.turn[path] + ops[0][one] + ops[1][two])
            if path and int(rest.max(initial=0)) + self.most[path][border] <= int(found.min(initial=IMPOSSIBLE)):
                continue
            lists = self._list(path)
            least = np.full(len(labels), IMPOSSIBLE)
            for step, may in steps:
                best = lists[step]
                if len(best.need):
                    place = np.searchsorted(best.need, room, "right") - 1
                    least = np.where(may & (place >= 0), np.minimum(least, rest + best.time[place]), least)
            found = np.maximum(found, least)
        return found

    def _list(self, path: int) -> dict[Step, _Best]:
        found = self.lists[path]
        if found is None:
            found = self.lists[path] = self._suffixes(path)
        return found

    def _suffixes(self, path: int) -> dict[Step, _Best]:
        turn = self.world.forward_level[-1] + self.world.turn.top
        lists = {self.turn_step: _Best(np.array([turn]), np.zeros(1, np.int64))}
        for border in reversed(range(self.last)):
            low, high = self.allowed - self.most_kept[border], self.allowed - self.least_kept[border]
            for step in self.steps[border]:
                terms = [
                    (lists[after], option.kept, self._own(step, option, after), self._work(option, path))
                    for after in self.steps[step[1]]
                    for option in self.options[step]
                ]
                lists[step] = _joined(terms, low, high)
        return lists

    def _work(self, option: Option, path: int) -> int:
        """Time that a piece adds to a path; where pieces share units, one hook in backward serves so many at most."""
        one, two = PATHS[path]
        found = option.work[0][one] + option.work[1][two]
        if STREAMS[two] == "host" or self.world.is_serial:
            found += self.world.unit_host_ns // self.longest
        return found

    def _most(self, path: int) -> list[int]:
        """By border: most that the places behind it add to a path."""
        found = [0] * (self.last + 1)
        for border in reversed(range(self.last)):
            ways = (
                found[step[1]] + self._work(option, path)
                for step in self.steps[border]
                for option in self.options[step]
            )
            found[border] = max(ways, default=0)
        return found

    def _first_needs(self) -> dict[Step, int]:
        found = {self.turn_step: self.world.forward_level[-1] + self.world.turn.pending_top}
        for step, options in self.options.items():
            after = self.steps[step[1]]
            found[step] = min((self._backward(step, option, each) for option in options for each in after), default=0)
        return found

    def _backward(self, step: Step, option: Option, after: Step) -> int:
        """Room that the backward of a piece needs while what is before it is prefetched, another one behind it."""
        world, stop = self.world, step[1]
        if not self.is_alone:
            return option.kept + world.floor[stop] + world.behind.get(after, 0) + option.ops_top
        top = max(option.pending_top + self.input_bytes[after], option.closed_top)
        return option.kept + world.backward_level[stop] + top

    def _own(self, step: Step, option: Option, after: Step) -> int:
        """Room that a piece needs with its own backward, and with its parameters ahead of what is behind it."""
        ahead = option.buffer_bytes if option.reshard else 0
        own = max(self._backward(step, option, after), self.first_need[after] + option.kept + ahead)
        if self.is_alone:
            opens = self.world.backward_level[step[1]] + option.open_top + self.input_bytes[after]
            own = max(own, option.kept + opens)
        return own

    def _kept(self) -> tuple[list[int], list[int]]:
        """By border: least and most bytes that the places before it keep."""
        least, most = [IMPOSSIBLE] * (self.last + 1), [-IMPOSSIBLE] * (self.last + 1)
        for start in self.world.starts(1):
            least[start.stop] = min(least[start.stop], start.kept)
            most[start.stop] = max(most[start.stop], start.kept)
        for border in range(self.last):
            for step in self.steps[border]:
                kept = [each.kept for each in self.options[step]]
                least[step[1]] = min(least[step[1]], least[border] + min(kept))
                most[step[1]] = max(most[step[1]], most[border] + max(kept))
        return least, most


def _through_prefetch(labels: Column) -> Column:
    """Dual of the communicator before the prefetch of the label's last unit."""
    dual = labels[:, _SHARD_DUAL]
    ahead = np.maximum(dual, labels[:, _ARRIVAL_DUAL]) + labels[:, GATHER_NS]
    return np.where(labels[:, AHEAD] > 0, np.maximum(ahead, dual), dual)


def _turn_times(world: World) -> tuple[int, ...]:
    """What the turn adds along each path."""
    before, after = world.turn.before, world.turn.after
    found = []
    for one, two in PATHS:
        value = int((after[BACKWARD.index(STREAMS[two])] + before[:, FORWARD.index(STREAMS[one])]).max())
        # No clock goes back; from one stream to another there may be no way.
        found.append(max(value, 0) if one == two else value if value > NEVER // 2 else -IMPOSSIBLE)
    return tuple(found)


def _joined(terms: list[tuple[_Best, int, int, int]], low: int, high: int) -> _Best:
    """Best sums of a suffix with one more place before it, from the room ``low`` to ``high`` that labels may leave.

    Args:
        terms: list of the rest, bytes kept, own need and time of each choice.
        low: with so much room or less there is a label, so that what needs less needs nothing.
        high: no label leaves more.
    """
    need = np.concatenate([np.maximum(rest.need + kept, own) for rest, kept, own, _ in terms])
    time = np.concatenate([rest.time + more for rest, _, _, more in terms])
    if need.max(initial=0) > high:
        fits = need <= high
        need, time = need[fits], time[fits]
    need = np.where(need <= low, -IMPOSSIBLE, need)
    order = np.lexsort((time, need))
    need, time = need[order], time[order]
    least = np.minimum.accumulate(time)
    is_better = np.ones(len(time), bool)
    is_better[1:] = least[1:] < least[:-1]
    return _Best(need[is_better], time[is_better])
