"""Lower bounds: what the rest of the chain takes at least, whatever is decided there.

The end of the step is the longest of many paths, so any one path bounds it from below. What the places of a suffix add
to a path on one stream is a sum, and each place chooses how much it keeps: with fewer bytes it is gathered again or
recomputes. For every suffix the best sums for each number of bytes kept are a list (a knapsack solved exactly, jointly
over recompute and reshard); a label looks up the bytes that it leaves. Two moments limit them: the turn, and the
backward of the last unit, during which the parameters of the last places are unsharded whatever was decided.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.planner.chain import Place
from autoshard.planner.clocks import BACKWARD, FORWARD, NEVER
from autoshard.planner.labels import (
    AHEAD,
    COMPUTE,
    DUAL,
    GATHER_NS,
    HOST,
    KEPT,
    SHARD,
)
from autoshard.planner.world import Option, World

Column = npt.NDArray[np.int64]

IMPOSSIBLE = 1 << 60
"""Bound of a label from which no plan fits."""

_SHARD_DUAL = DUAL + BACKWARD.index("shard")
_ARRIVAL_DUAL = DUAL + BACKWARD.index("arrival")
_COMPUTE_DUAL = DUAL + BACKWARD.index("compute")
_HOST_DUAL = DUAL + BACKWARD.index("host")
PATHS = ("compute", "shard", "host")
NUM_FORCED = 2
"""Last places whose parameters are unsharded in the backward of the last unit: its own, and those prefetched."""


@dataclass(frozen=True, slots=True)
class _Best:
    """Least times by bytes kept: both sorted, the times falling; ``number`` tells lists apart."""

    kept: Column
    time: Column
    number: int = 0


class Lists:
    """The lists of one world, which no allowance changes; worlds with like ends share them through ``known``."""

    def __init__(self, world: World, known: dict[tuple[object, ...], _Best] | None = None) -> None:
        self.world = world
        self.known = {} if known is None else known
        self.turn = _turn_times(world)
        self.single: dict[tuple[int, int], list[Option]] = {}
        for options in world.options:
            for option in options:
                self.single.setdefault((option.first, option.stop), []).append(option)
        self.forced = _forced(world)
        self.excess = self._excess()
        self.best = {(path, at_last): self._suffixes(path, at_last) for path in PATHS for at_last in (False, True)}

    def _excess(self) -> int:
        """Bytes that the backward of any last unit takes beside what is kept and the parameters that are forced."""
        last = self.world.chain.num_borders - 1
        found = []
        for options in self.world.options:
            for option in options:
                if option.stop == last:
                    covered = sum(size for first, size in self.forced.items() if first >= option.first)
                    top = max(option.open_top, option.pending_top)
                    found.append(top - (covered if option.reshard else 0))
        return min(found, default=0)

    def _suffixes(self, path: str, at_last: bool) -> list[_Best | None]:
        chain = self.world.chain
        lists: list[_Best | None] = [None] * chain.num_borders
        rest = lists[chain.num_borders - 1] = _Best(np.zeros(1, np.int64), np.zeros(1, np.int64))
        for piece in reversed(self.world.pieces):
            inner = rest
            if piece[0].module in self.world.parts:
                for part in reversed(self.world.parts[piece[0].module]):
                    inner = self._joined(inner, self._choices(part, path, at_last))
                    lists[part[0].first] = inner
            rest = lists[piece[0].first] = self._joined(rest, self._all_choices(piece, path, at_last))
        return lists

    def _joined(self, rest: _Best, choices: list[tuple[int, int]]) -> _Best:
        """Best sums of a suffix with one more piece before it."""
        key = rest.number, *choices
        if key not in self.known:
            self.known[key] = _joined(rest, choices, len(self.known) + 1)
        return self.known[key]

    def _all_choices(self, piece: tuple[Place, ...], path: str, at_last: bool) -> list[tuple[int, int]]:
        """What a piece may keep and take, whole or cut into its parts."""
        found = self._choices(piece, path, at_last)
        if piece[0].module in self.world.parts:
            sums = [(0, 0)]
            for part in self.world.parts[piece[0].module]:
                choices = self._choices(part, path, at_last)
                sums = _thin([(kept + more, time + add) for kept, time in sums for more, add in choices])
            found = found + sums
        return _thin(found)

    def _choices(self, piece: tuple[Place, ...], path: str, at_last: bool) -> list[tuple[int, int]]:
        first, stop = piece[0].first, piece[-1].stop
        forced = 0
        if at_last:
            forced = sum(size for border, size in self.forced.items() if first <= border < stop)
        found = []
        for option in self.single.get((first, stop), ()):
            kept = option.kept + (forced if option.reshard else 0)
            found.append((kept, option.work[PATHS.index(path)]))
        return _thin(found)


class Bounds:
    """Lower bounds of one world under one allowance."""

    def __init__(self, lists: Lists, allowed_bytes: int) -> None:
        world = lists.world
        self.world, self.lists = world, lists
        turn, level = world.turn, world.forward_level[-1]
        highest = max(turn.top, turn.pending_top, turn.prefetch_level)
        self.room_turn = allowed_bytes - level - highest
        # Of the places that are forced, the last one alone is surely prefetched at the turn.
        spare = sum(size for first, size in lists.forced.items() if first != max(lists.forced))
        last = max(world.backward_level[-1] + lists.excess, level + turn.pending_top - spare)
        self.room_last = allowed_bytes - last

    def __call__(self, border: int, labels: Column) -> Column:
        """Least step time of any plan that continues each label."""
        kept = labels[:, KEPT]
        own = {
            "compute": labels[:, COMPUTE] + labels[:, _COMPUTE_DUAL],
            "host": labels[:, HOST] + labels[:, _HOST_DUAL],
            "shard": labels[:, SHARD] + _through_prefetch(labels),
        }
        found = np.zeros(len(labels), np.int64)
        for path in PATHS:
            for at_last in (False, True):
                best = self.lists.best[path, at_last][border]
                if best is None:
                    continue
                room = (self.room_last if at_last else self.room_turn) - kept
                place = np.searchsorted(best.kept, room, "right") - 1
                rest = self.lists.turn[path] + self.world.ops_after[border][PATHS.index(path)]
                bound = np.where(place < 0, IMPOSSIBLE, own[path] + rest + best.time[place])
                found = np.maximum(found, bound)
        return found


def _through_prefetch(labels: Column) -> Column:
    """Dual of the communicator before the prefetch of the label's last unit."""
    dual = labels[:, _SHARD_DUAL]
    ahead = np.maximum(dual, labels[:, _ARRIVAL_DUAL]) + labels[:, GATHER_NS]
    return np.where(labels[:, AHEAD] > 0, np.maximum(ahead, dual), dual)


def _turn_times(world: World) -> dict[str, int]:
    """What the turn adds along each path."""
    before, after = world.turn.before, world.turn.after
    found = {}
    for path in PATHS:
        one, two = FORWARD.index(path), BACKWARD.index(path)
        value = int((after[two] + before[:, one]).max())
        found[path] = max(value, 0) if value > NEVER // 2 else 0
    return found


def _forced(world: World) -> dict[int, int]:
    """Parameter bytes of the last pieces, by the border at which each begins."""
    last = world.chain.num_borders - 1
    sizes = {(option.first, option.stop): option.buffer_bytes for options in world.options for option in options}
    found: dict[int, int] = {}
    stop = last
    finest = [part for piece in world.pieces for part in _finest(world, piece)]
    for piece in reversed(finest[-NUM_FORCED:]):
        if piece[-1].stop != stop or (piece[0].first, stop) not in sizes:
            break
        found[piece[0].first] = sizes[piece[0].first, stop]
        stop = piece[0].first
    return found


def _finest(world: World, piece: tuple[Place, ...]) -> tuple[tuple[Place, ...], ...]:
    """A piece, or the pieces into which it is cut."""
    if piece[0].module in world.parts:
        return world.parts[piece[0].module]
    return (piece,)


def _thin(choices: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Choices of which none keeps as little and takes as short as another."""
    found: list[tuple[int, int]] = []
    for kept, time in sorted(choices):
        if not found or time < found[-1][1]:
            found.append((kept, time))
    return found


def _joined(rest: _Best, choices: list[tuple[int, int]], number: int) -> _Best:
    if len(choices) == 1:
        return _Best(rest.kept + choices[0][0], rest.time + choices[0][1], number)
    kept = np.concatenate([rest.kept + each for each, _ in choices])
    time = np.concatenate([rest.time + each for _, each in choices])
    order = np.argsort(kept, kind="stable")
    kept, time = kept[order], time[order]
    least = np.minimum.accumulate(time)
    is_better = np.ones(len(time), bool)
    is_better[1:] = least[1:] < least[:-1]
    return _Best(kept[is_better], time[is_better], number)
