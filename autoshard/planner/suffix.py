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
from autoshard.planner.labels import AHEAD, COMPUTE, DUAL, GATHER_NS, HOST, KEPT, SHARD
from autoshard.planner.world import Option, World

Column = npt.NDArray[np.int64]

IMPOSSIBLE = 1 << 60
"""Bound of a label from which no plan fits."""

_SHARD_DUAL = DUAL + BACKWARD.index("shard")
_ARRIVAL_DUAL = DUAL + BACKWARD.index("arrival")
_COMPUTE_DUAL = DUAL + BACKWARD.index("compute")
_HOST_DUAL = DUAL + BACKWARD.index("host")
PATHS = ("compute", "shard", "host")


@dataclass(frozen=True, slots=True)
class _Best:
    """Least times by room: both sorted, the times falling."""

    need: Column
    time: Column


@dataclass(frozen=True, slots=True)
class _Choice:
    """A piece with its decisions, as a suffix sees it.

    Attributes:
        stop: border at which it stops.
        kept: bytes that it keeps to backward.
        own: room that its own backward needs before it, and with its parameters ahead of the next one's.
        work: time that it adds, by path.
    """

    stop: int
    kept: int
    own: int
    work: tuple[int, ...]


class Bounds:
    """Lower bounds of one world under one allowance.

    Where pieces may share units, a piece needs what it does in any of them; alone it needs more.

    Attributes:
        first_need: by border: room that the backward of the next place needs, its prefetch included.
    """

    def __init__(self, world: World, allowed_bytes: int, longest: int) -> None:
        self.world, self.allowed, self.is_alone = world, allowed_bytes, longest == 1
        self.single = [world.options(border, 1) for border in range(world.chain.num_borders)]
        self.first_need = self._first_needs()
        self.choices = [[self._choice(border, option) for option in found] for border, found in enumerate(self.single)]
        self.least_kept, self.most_kept = self._kept()
        self.turn = _turn_times(world)
        self.most = [self._most(path) for path in range(len(PATHS))]
        self.lists: list[list[_Best | None] | None] = [None] * len(PATHS)

    def __call__(self, border: int, labels: Column) -> Column:
        """Least step time of any plan that continues each label."""
        own = (
            labels[:, COMPUTE] + labels[:, _COMPUTE_DUAL],
            labels[:, SHARD] + _through_prefetch(labels),
            labels[:, HOST] + labels[:, _HOST_DUAL],
        )
        room = self.allowed - labels[:, KEPT]
        found = np.where(self.first_need[border] + labels[:, AHEAD] > room, IMPOSSIBLE, 0)
        for path, spent in enumerate(own):
            rest = spent + (self.turn[path] + self.world.ops_after[border][path])
            if path and int(rest.max(initial=0)) + self.most[path][border] <= int(found.min(initial=IMPOSSIBLE)):
                continue
            best = self._list(path)[border]
            if best is None:
                continue
            if not len(best.need):
                found[:] = IMPOSSIBLE
            else:
                place = np.searchsorted(best.need, room, "right") - 1
                found = np.maximum(found, np.where(place < 0, IMPOSSIBLE, rest + best.time[place]))
        return found

    def _list(self, path: int) -> list[_Best | None]:
        found = self.lists[path]
        if found is None:
            found = self.lists[path] = self._suffixes(path)
        return found

    def _suffixes(self, path: int) -> list[_Best | None]:
        world = self.world
        last = world.chain.num_borders - 1
        turn = world.forward_level[-1] + world.turn.top
        lists: list[_Best | None] = [None] * (last + 1)
        lists[last] = _Best(np.array([turn]), np.zeros(1, np.int64))
        for border in reversed(range(last)):
            terms = [
                (rest, each.kept, each.own, each.work[path])
                for each in self.choices[border]
                if (rest := lists[each.stop]) is not None
            ]
            if terms:
                lists[border] = _joined(
                    terms, self.allowed - self.most_kept[border], self.allowed - self.least_kept[border]
                )
        return lists

    def _most(self, path: int) -> list[int]:
        """By border: most that the places behind it add to a path."""
        found = [0] * self.world.chain.num_borders
        for border in reversed(range(len(found) - 1)):
            found[border] = max((found[each.stop] + each.work[path] for each in self.choices[border]), default=0)
        return found

    def _first_needs(self) -> list[int]:
        world = self.world
        found = [IMPOSSIBLE] * world.chain.num_borders
        found[-1] = world.forward_level[-1] + world.turn.pending_top
        for border in range(len(found) - 1):
            found[border] = min((self._own(border, option) for option in self.single[border]), default=IMPOSSIBLE)
        return found

    def _own(self, border: int, option: Option) -> int:
        """Room that the backward of a piece needs, the prefetch of the one before it left out."""
        stop = border + option.length
        if not self.is_alone:
            return option.kept + self.world.floor[stop] + option.ops_top
        behind = min((each.input_bytes for each in self.single[stop]), default=0)
        top = max(option.pending_top + behind, option.closed_top)
        return option.kept + self.world.backward_level[stop] + top

    def _choice(self, border: int, option: Option) -> _Choice:
        stop = border + option.length
        ahead = option.buffer_bytes if option.reshard else 0
        own = max(self._own(border, option), self.first_need[stop] + option.kept + ahead)
        if self.is_alone:
            behind = min((each.input_bytes for each in self.single[stop]), default=0)
            own = max(own, option.kept + self.world.backward_level[stop] + option.open_top + behind)
        return _Choice(stop, option.kept, own, option.work)

    def _kept(self) -> tuple[list[int], list[int]]:
        """By border: least and most bytes that the places before it keep."""
        world = self.world
        least, most = [IMPOSSIBLE] * world.chain.num_borders, [-IMPOSSIBLE] * world.chain.num_borders
        for start in world.starts(1):
            least[start.stop] = min(least[start.stop], start.kept)
            most[start.stop] = max(most[start.stop], start.kept)
        for border, choices in enumerate(self.choices):
            for each in choices:
                least[each.stop] = min(least[each.stop], least[border] + each.kept)
                most[each.stop] = max(most[each.stop], most[border] + each.kept)
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
    for path in PATHS:
        one, two = FORWARD.index(path), BACKWARD.index(path)
        value = int((after[two] + before[:, one]).max())
        found.append(max(value, 0) if value > NEVER // 2 else 0)
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
