"""The sweep: all plans of a world at once, border by border, as labels of which the worse ones are dropped.

A label is dropped if another one at the same border is nowhere worse (*dominated*: exact), or if no plan that continues
it can beat the best plan known (its *bound*: exact). A beam also drops labels that are merely not promising; the least
bound of those is then what is known about better plans. Counts limit the work, never seconds, so that the answer is the
same everywhere.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.planner.clocks import BACKWARD, NEVER
from autoshard.planner.labels import (
    COPY_IN,
    DUAL,
    GATHER_NS,
    HELD,
    NUM_COLUMNS,
    PENDING,
    Choices,
    Column,
    Tables,
    extend,
    start_label,
)
from autoshard.planner.suffix import IMPOSSIBLE, Bounds
from autoshard.planner.world import Option, Start

Ids = npt.NDArray[np.int64]

LONGEST = 8
"""Pieces that share a unit at most."""
HIGH = COPY_IN
"""Column of the most bytes alive so far, where times do not count."""
CHUNK = 400_000
"""Label columns that are extended at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep found.

    Attributes:
        step_ns: of the best plan, or the one given if none is better.
        start: of that plan, ``None`` if none is better.
        options: of that plan.
        bound_ns: no plan of the world is faster.
        num_labels: labels that were kept.
    """

    step_ns: int
    start: Start | None
    options: tuple[Option, ...]
    bound_ns: int
    num_labels: int


class Sweeper:
    """Sweeps of one world under one allowance."""

    def __init__(self, tables: Tables, allowed_bytes: int) -> None:
        self.tables, self.world, self.allowed = tables, tables.world, allowed_bytes
        self.known: dict[int, Bounds] = {}

    def bounds(self, longest: int) -> Bounds:
        """Lower bounds where up to so many pieces share a unit."""
        if longest not in self.known:
            self.known[longest] = Bounds(self.world, self.allowed, longest)
        return self.known[longest]

    def root_bound(self) -> int:
        """Least step time of all plans, ``IMPOSSIBLE`` if none fits.

        What a bound adds for a place holds wherever it is grouped, so the starts without groups bound all; but these
        may take more bytes at their own summit than longer ones, which therefore does not count here.
        """
        bounds, starts = self.bounds(LONGEST), self.world.starts(1)
        return min(int(bounds(start.stop, start_label(start)[None, :])[0]) for start in starts)

    def sweep(self, longest: int, below_ns: int, beam: int | None, limit: int | None = None) -> Swept:
        """The best plan that takes less than ``below_ns``.

        Args:
            longest: pieces that share a unit at most.
            below_ns: time of the best plan known.
            beam: labels kept at a border, all if ``None``.
            limit: labels kept in all, then the sweep is given up.
        """
        run = _Run(self, longest, below_ns, beam, limit)
        return run.result()


class _Run:
    def __init__(self, sweeper: Sweeper, longest: int, below_ns: int, beam: int | None, limit: int | None) -> None:
        self.sweeper, self.longest, self.best, self.beam, self.limit = sweeper, longest, below_ns, beam, limit
        self.world = sweeper.world
        num = self.world.chain.num_borders
        self.arriving: list[list[tuple[Column, Ids, Ids]]] = [[] for _ in range(num)]
        self.parents: list[Ids] = []
        self.chosen: list[Ids] = []
        self.borders: list[int] = []
        self.first_id: list[int] = []
        self.num_labels = 0
        self.lost = IMPOSSIBLE
        self.end: tuple[int, int, int] | None = None
        self.starts, self.bound = self.world.starts(longest), sweeper.bounds(longest)
        for index, start in enumerate(self.starts):
            if start.high > sweeper.allowed:
                continue
            label = start_label(start)[None, :]
            if start.stop == num - 1:
                step_ns, high = sweeper.tables.finish(label)
                if high[0] <= sweeper.allowed and step_ns[0] < self.best:
                    self.best, self.end = int(step_ns[0]), (-1 - index, -1, -1)
                continue
            self.arriving[start.stop].append((label, np.array([-1 - index]), np.array([-1])))
        for border in range(num - 1):
            if not self._at(border):
                self._give_up(border)
                break

    def result(self) -> Swept:
        start, options = self._plan()
        return Swept(
            step_ns=self.best,
            start=start,
            options=options,
            bound_ns=min(self.best, self.lost),
            num_labels=self.num_labels,
        )

    def _at(self, border: int) -> bool:
        """All labels at a border; false if the limit is reached."""
        arrived = self.arriving[border]
        if not arrived:
            return True
        labels = np.concatenate([each for each, _, _ in arrived])
        parents = np.concatenate([each for _, each, _ in arrived])
        chosen = np.concatenate([each for _, _, each in arrived])
        self.arriving[border] = []
        labels = self._canonical(border, labels)
        bound = self.bound(border, labels)
        keep = np.nonzero(bound < self.best)[0]
        if self.beam is not None and len(keep) > 20 * self.beam:
            order = np.argsort(bound[keep], kind="stable")
            self.lost = min(self.lost, int(bound[keep[order[20 * self.beam]]]))
            keep = keep[order[: 20 * self.beam]]
        labels, parents, chosen, bound = labels[keep], parents[keep], chosen[keep], bound[keep]
        keep = undominated(labels, bound)
        if self.beam is not None and len(keep) > self.beam:
            order = np.argsort(bound[keep], kind="stable")
            self.lost = min(self.lost, int(bound[keep[order[self.beam]]]))
            keep = np.sort(keep[order[: self.beam]])
        labels, parents, chosen, bound = labels[keep], parents[keep], chosen[keep], bound[keep]
        first = self.num_labels
        self.num_labels += len(labels)
        self.parents.append(parents)
        self.chosen.append(chosen)
        self.borders.append(border)
        self.first_id.append(first)
        if self.limit is not None and self.num_labels > self.limit:
            self.lost = min(self.lost, int(bound.min(initial=IMPOSSIBLE)))
            return False
        found = self.sweeper.tables.choices(border, self.longest) if len(labels) else None
        if found is not None:
            size = max(1, CHUNK // (len(found.options) * NUM_COLUMNS))
            for at in range(0, len(labels), size):
                self._extend(found, labels[at : at + size], first + at, border)
        return True

    def _extend(self, found: Choices, labels: Column, first: int, border: int) -> None:
        allowed, last = self.sweeper.allowed, self.world.chain.num_borders - 1
        extension = extend(self.world, border, labels, found)
        rows, options = np.nonzero(extension.high <= allowed)
        made, length = extension.labels[rows, options], found.bytes["length"][options]
        for each in found.lengths:
            which = np.nonzero(length == each)[0] if len(found.lengths) > 1 else np.arange(len(rows))
            if not len(which):
                continue
            if border + each == last:
                step_ns, high = self.sweeper.tables.finish(made[which])
                step_ns = np.where(high <= allowed, step_ns, IMPOSSIBLE)
                least = int(np.argmin(step_ns))
                if step_ns[least] < self.best:
                    self.best = int(step_ns[least])
                    self.end = first + int(rows[which[least]]), border, int(options[which[least]])
            else:
                self.arriving[border + each].append((made[which], first + rows[which], options[which]))

    def _canonical(self, border: int, labels: Column) -> Column:
        """Labels with the same future made equal."""
        world = self.world
        if world.has_input and not world.is_serial:
            dual = {name: DUAL + place for place, name in enumerate(BACKWARD)}
            # The next unit's reduce-scatter is the last thing on the communicator, and the last reduction so far.
            ended = np.maximum(labels[:, dual["shard"]], labels[:, dual["input"]])
            if world.replicas == 1:
                ended = np.maximum(ended, labels[:, dual["reduced"]])
            else:
                labels[:, dual["replicate"]] = np.maximum(labels[:, dual["replicate"]], labels[:, dual["reduced"]])
            labels[:, dual["shard"]] = ended
            labels[:, dual["input"]] = labels[:, dual["reduced"]] = NEVER
        chosen = self.sweeper.tables.choices(border, self.longest)
        most_input = 0 if chosen is None else int(chosen.bytes["input_bytes"].max())
        harmless = labels[:, PENDING] + most_input <= self.sweeper.allowed
        labels[:, PENDING] = np.where(harmless, 0, labels[:, PENDING])
        return labels

    def _give_up(self, border: int) -> None:
        """What is open bounds what is not known."""
        for later in range(border + 1, self.world.chain.num_borders - 1):
            for labels, _, _ in self.arriving[later]:
                bound = self.bound(later, self._canonical(later, labels))
                self.lost = min(self.lost, int(bound.min(initial=IMPOSSIBLE)))

    def _plan(self) -> tuple[Start | None, tuple[Option, ...]]:
        if self.end is None:
            return None, ()
        label, border, option = self.end
        options: list[Option] = []
        if option >= 0:
            options.append(self.world.options(border, self.longest)[option])
        while label >= 0:
            block = int(np.searchsorted(self.first_id, label, "right")) - 1
            while not len(self.parents[block]) or label >= self.first_id[block] + len(self.parents[block]):
                block -= 1
            place = label - self.first_id[block]
            parent, which = int(self.parents[block][place]), int(self.chosen[block][place])
            if parent >= 0:
                origin = int(np.searchsorted(self.first_id, parent, "right")) - 1
                while not len(self.parents[origin]) or parent >= self.first_id[origin] + len(self.parents[origin]):
                    origin -= 1
                options.append(self.world.options(self.borders[origin], self.longest)[which])
            label = parent
        return self.starts[-1 - label], tuple(reversed(options))


def least_peak(tables: Tables, longest: int, best: int) -> int:
    """The lowest peak of all plans, or ``best`` if none is lower.

    The sweep in which no time counts: labels are bytes, and the most that was alive so far stands among them.
    """
    world = tables.world
    last = world.chain.num_borders - 1
    arriving: list[list[Column]] = [[] for _ in range(last + 1)]
    for start in world.starts(longest):
        label = start_label(start)[None, :]
        label[:, HIGH] = start.high
        arriving[start.stop].append(label)
    for border in range(last):
        if not arriving[border]:
            continue
        labels = np.concatenate(arriving[border])
        labels[:, :HELD] = labels[:, GATHER_NS] = 0
        labels = labels[labels[:, HIGH] < best]
        labels = labels[undominated(labels, labels[:, HIGH])]
        found = tables.choices(border, longest) if len(labels) else None
        if found is None:
            continue
        extension = extend(world, border, labels, found)
        highest = np.maximum(extension.high, labels[:, HIGH, None])
        for each in found.lengths:
            places = np.nonzero(found.bytes["length"] == each)[0]
            made, so_far = extension.labels[:, places].reshape(-1, NUM_COLUMNS), highest[:, places].reshape(-1)
            if border + each == last:
                best = min(best, int(np.maximum(tables.finish(made)[1], so_far).min()))
            else:
                made[:, HIGH] = so_far
                arriving[border + each].append(made)
    for label in arriving[last]:
        best = min(best, int(np.maximum(tables.finish(label)[1], label[:, HIGH]).min()))
    return best


def undominated(labels: Column, bound: Column) -> Ids:
    """Labels of which no other one is nowhere worse, by rising bound; of equal ones the first."""
    order = np.lexsort((labels[:, 0], bound)) if len(labels) else np.zeros(0, np.int64)
    values = labels[order]
    alive = np.ones(len(values), bool)
    kept = []
    for index in range(len(values)):
        if not alive[index]:
            continue
        kept.append(index)
        rest = np.nonzero(alive[index + 1 :])[0] + index + 1
        if len(rest):
            worse = (values[index] <= values[rest]).all(1)
            alive[rest[worse]] = False
    return order[np.array(kept, np.int64)] if kept else np.zeros(0, np.int64)
