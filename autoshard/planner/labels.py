"""Labels of the sweep, and the step from one border of the chain to the next.

A label is a prefix of the chain with all its decisions, as far as they matter for what comes after: the clocks of
forward after it, the *dual* clocks of its backward (for each clock that the rest of the chain hands over, the longest
path to the end of the step), and bytes. Everything is whole; every component is better where it is smaller, so labels
are compared component by component.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.planner.clocks import BACKWARD, FORWARD, NEVER, Matrix
from autoshard.planner.world import Option, Start, World

Column = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NUM_FORWARD, NUM_BACKWARD = len(FORWARD), len(BACKWARD)
COMPUTE, HOST, GATHER, SHARD, COPIED = range(NUM_FORWARD)
DUAL = NUM_FORWARD
"""First column of the dual clocks, in the order of ``BACKWARD``."""
_B = {name: place for place, name in enumerate(BACKWARD)}
_LEVELLED = ("compute", "host", "gather", "shard", "replicate")
"""Clocks that are one where nothing overlaps."""
HELD, KEPT, PENDING, DEFERRED, AHEAD, CAST, COPY_IN, GATHER_NS = range(DUAL + NUM_BACKWARD, DUAL + NUM_BACKWARD + 8)
"""Columns: bytes kept in forward, and to backward; most bytes in the last unit's backward while the next unit's
reduce-scatter input is alive; its all-gather's buffer; that of its prefetch; the copy of its shards meanwhile; times of
its all-gather."""
NUM_COLUMNS = GATHER_NS + 1


@dataclass(frozen=True, slots=True)
class Choices:
    """The options at a border as arrays, one column each."""

    options: tuple[Option, ...]
    stop: npt.NDArray[np.int64]
    forward: tuple[tuple[int, int, Column], ...]
    ahead: tuple[tuple[int, int, Column], ...]
    after: tuple[tuple[int, int, Column], ...]
    bytes: dict[str, Column]
    forward_level: int
    settled: int
    backward_level: Column
    is_serial: bool


_BYTES = (
    "forward_top", "deferred_top", "held", "kept", "open_top", "prefetch_level", "pending_top", "closed_top",
    "buffer_bytes", "cast_bytes", "copy_in_ns", "gather_ns", "input_bytes",
)  # fmt: skip


class Tables:
    """The options of a world as arrays.

    Attributes:
        world: the world.
        choices: by border, ``None`` where no option begins.
        finish: the turn.
    """

    def __init__(self, world: World) -> None:
        self.world, self.finish = world, Finish(world)
        every = [option for options in world.options for option in options]
        self.choices: list[Choices | None] = [None] * len(world.options)
        if not every:
            return
        rows = [[getattr(option, name) for name in _BYTES] for option in every]
        numbers = dict(zip(_BYTES, np.array(rows, np.int64).T, strict=True))
        numbers["ahead_bytes"] = np.where([option.reshard for option in every], numbers["buffer_bytes"], 0)
        level = np.array([world.backward_level[option.stop] for option in every], np.int64)
        stop = np.array([option.stop for option in every])
        matrices = [_entries([getattr(option, name) for option in every]) for name in ("forward", "ahead", "after")]
        first = 0
        for border, options in enumerate(world.options):
            here = slice(first, first + len(options))
            first += len(options)
            if options:
                forward, ahead, after = (
                    tuple((row, column, value[:, here]) for row, column, value in entries) for entries in matrices
                )
                self.choices[border] = Choices(
                    options=options,
                    stop=stop[here],
                    forward=forward,
                    ahead=ahead,
                    after=after,
                    bytes={name: values[None, here] for name, values in numbers.items()},
                    forward_level=world.forward_level[border],
                    settled=world.settled[border],
                    backward_level=level[None, here],
                    is_serial=world.is_serial,
                )


def _entries(matrices: list[Matrix]) -> tuple[tuple[int, int, Column], ...]:
    """(row, column, coefficients) of the entries that bind in some matrix."""
    stacked = np.stack(matrices)
    places = np.argwhere(stacked.max(0) > NEVER)
    return tuple((int(row), int(column), stacked[None, :, row, column].copy()) for row, column in places)


def start_label(start: Start) -> npt.NDArray[np.int64]:
    """The label of a start."""
    label = np.empty(NUM_COLUMNS, np.int64)
    label[:NUM_FORWARD] = start.clocks
    label[DUAL : DUAL + NUM_BACKWARD] = start.dual
    if not start.ahead_bytes:
        label[DUAL + _B["arrival"]] = NEVER
    label[HELD], label[KEPT] = start.held, start.kept
    label[PENDING], label[DEFERRED] = start.pending, start.deferred_bytes
    label[AHEAD], label[CAST] = start.ahead_bytes, start.cast_bytes
    label[COPY_IN], label[GATHER_NS] = start.copy_in_ns, start.gather_ns
    return label


@dataclass(frozen=True, slots=True)
class Extension:
    """All labels at a border times all its options: arrays of shape (labels, options).

    Attributes:
        columns: the labels that they make, by column.
        high: most bytes alive in what is decided now.
    """

    columns: list[Column]
    high: Column


def extend(labels: npt.NDArray[np.int64], chosen: Choices) -> Extension:
    """Each label with each option behind it."""
    column = [labels[:, index : index + 1] for index in range(NUM_COLUMNS)]
    size = chosen.bytes
    forward = _apply(chosen.forward, column[:NUM_FORWARD], NUM_FORWARD)
    dual = _apply_dual(chosen.after, column[DUAL : DUAL + NUM_BACKWARD], NUM_BACKWARD)
    dual = prefetch(dual, column[AHEAD] > 0, column[COPY_IN], column[GATHER_NS], chosen.is_serial)
    dual = _apply_dual(chosen.ahead, dual, NUM_BACKWARD)
    held, kept = column[HELD] + size["held"], column[KEPT] + size["kept"]
    alive = (column[HELD], column[KEPT], np.minimum(column[HELD], column[KEPT]))[chosen.settled]
    before = chosen.forward_level + alive
    level = chosen.backward_level + kept
    ahead = column[AHEAD]
    high = np.maximum(before + np.maximum(size["deferred_top"] + column[DEFERRED], size["forward_top"]), 0)
    high = np.maximum(high, column[PENDING] + size["input_bytes"])
    high = np.maximum(high, level + size["closed_top"] + ahead)
    pending = level + np.maximum(
        np.maximum(size["open_top"], size["pending_top"] + ahead),
        size["prefetch_level"] + np.where(ahead > 0, ahead + column[CAST], 0),
    )
    shape = high.shape
    own = [held, kept, pending, size["buffer_bytes"], size["ahead_bytes"]]
    own += [np.where(size["ahead_bytes"] > 0, size[name], 0) for name in ("cast_bytes", "copy_in_ns", "gather_ns")]
    return Extension([np.broadcast_to(each, shape) for each in (*forward, *dual, *own)], high)


def prefetch(
    dual: list[Column], is_gathered: Mask, copy_in_ns: Column, gather_ns: Column, is_serial: bool
) -> list[Column]:
    """The dual clocks before a prefetch, from those after it."""
    if is_serial:
        latest = dual[_B["arrival"]]
        for name in _LEVELLED:
            latest = np.maximum(latest, dual[_B[name]])
        latest = np.where(is_gathered, latest + copy_in_ns + gather_ns, latest)
        found = list(dual)
        for name in _LEVELLED:
            found[_B[name]] = latest
        found[_B["arrival"]] = np.full_like(latest, NEVER)
        return [np.maximum(each, NEVER) for each in found]
    arrived = np.maximum(dual[_B["shard"]], dual[_B["arrival"]]) + gather_ns
    copied = np.maximum(dual[_B["gather"]], arrived) + copy_in_ns
    found = list(dual)
    found[_B["shard"]] = np.where(is_gathered, arrived, dual[_B["shard"]])
    found[_B["gather"]] = np.where(is_gathered, copied, dual[_B["gather"]])
    found[_B["host"]] = np.where(is_gathered, np.maximum(dual[_B["host"]], copied), dual[_B["host"]])
    found[_B["arrival"]] = np.full_like(arrived, NEVER)
    return [np.maximum(each, NEVER) for each in found]


def _apply(entries: tuple[tuple[int, int, Column], ...], clocks: list[Column], size: int) -> list[Column]:
    """Clocks after a piece, from those before it."""
    found: list[Column | None] = [None] * size
    for row, column, value in entries:
        term = clocks[column] + value
        old = found[row]
        found[row] = term if old is None else np.maximum(old, term)
    return [np.maximum(each, NEVER) if each is not None else np.full_like(clocks[0], NEVER) for each in found]


def _apply_dual(entries: tuple[tuple[int, int, Column], ...], dual: list[Column], size: int) -> list[Column]:
    """Dual clocks before a piece, from those after it."""
    found: list[Column | None] = [None] * size
    for row, column, value in entries:
        term = dual[row] + value
        old = found[column]
        found[column] = term if old is None else np.maximum(old, term)
    return [np.maximum(each, NEVER) if each is not None else np.full_like(dual[0], NEVER) for each in found]


class Finish:
    """The turn, for labels at the end of the chain."""

    def __init__(self, world: World) -> None:
        turn = world.turn
        self.turn, self.level, self.is_serial = turn, world.forward_level[-1], world.is_serial
        self.before, self.after = _entries([turn.before]), _entries([turn.after])

    def __call__(self, columns: list[Column]) -> tuple[Column, Column]:
        """Step time, and most bytes alive from the turn on, of labels given by column."""
        turn = self.turn
        dual = _apply_dual(self.after, columns[DUAL : DUAL + NUM_BACKWARD], NUM_BACKWARD)
        dual = prefetch(dual, columns[AHEAD] > 0, columns[COPY_IN], columns[GATHER_NS], self.is_serial)
        dual = _apply_dual(self.before, dual, NUM_FORWARD)
        step_ns = dual[0] + columns[0]
        for index in range(1, NUM_FORWARD):
            step_ns = np.maximum(step_ns, dual[index] + columns[index])
        ahead = columns[AHEAD]
        level = self.level + columns[KEPT]
        high = np.maximum(level + turn.deferred_top + columns[DEFERRED], level + turn.top)
        high = np.maximum(high, level + turn.pending_top + ahead)
        high = np.maximum(high, np.where(ahead > 0, level + turn.prefetch_level + ahead + columns[CAST], 0))
        return step_ns, np.maximum(high, columns[PENDING])


def price(tables: Tables, start: Start, options: list[Option]) -> tuple[int, int]:
    """Step time and peak of one plan: a start and options that reach from border to border."""
    label, high = start_label(start)[None, :], start.high
    for option in options:
        found = tables.choices[option.first]
        assert found is not None
        index = next(place for place, each in enumerate(found.options) if each is option)
        extension = extend(label, found)
        high = max(high, int(extension.high[0, index]))
        label = np.array([[each[0, index] for each in extension.columns]], np.int64)
    step_ns, last = tables.finish([label[:, place : place + 1] for place in range(NUM_COLUMNS)])
    return int(step_ns[0, 0]), max(high, int(last[0, 0]))
