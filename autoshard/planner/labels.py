"""Labels of the sweep, and the step from one border of the chain to the next.

A label is a prefix of the chain with all its decisions, as far as they matter for what comes after: the clocks of
forward after it, the *dual* clocks of its backward (for each clock that the rest of the chain hands over, the longest
path to the end of the step), and bytes. Everything is whole; every component is better where it is smaller, so labels
are compared component by component.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.planner.clocks import BACKWARD, FORWARD, NEVER
from autoshard.planner.world import Option, Start, World

Column = npt.NDArray[np.int64]

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


_BYTES = (
    "length", "forward_top", "deferred_top", "held", "kept", "open_top", "prefetch_level", "pending_top", "closed_top",
    "buffer_bytes", "cast_bytes", "copy_in_ns", "gather_ns", "input_bytes",
)  # fmt: skip


class Choices:
    """Options that begin at one border, as arrays: matrices as (clock before, option, clock after), bytes by option.

    Attributes:
        options: they themselves.
        lengths: borders from their first to where they stop, each once.
        bytes: by name.
    """

    def __init__(self, options: tuple[Option, ...]) -> None:
        self.options = options
        rows = [[getattr(option, name) for name in _BYTES] for option in options]
        self.bytes: dict[str, Column] = dict(zip(_BYTES, np.array(rows, np.int64).T.copy(), strict=True))
        self.lengths = tuple(sorted({option.length for option in options}))
        reshards = np.array([option.reshard for option in options])
        size = self.bytes
        size["ahead_bytes"] = np.where(reshards, size["buffer_bytes"], 0)
        self.own = np.stack(
            [size["buffer_bytes"], size["ahead_bytes"]]
            + [np.where(size["ahead_bytes"] > 0, size[name], 0) for name in ("cast_bytes", "copy_in_ns", "gather_ns")],
            axis=1,
        )
        self.forward = np.stack([option.forward for option in options]).transpose(2, 0, 1)[:, None].copy()
        # Dual clocks go the other way: from those after a piece to those before it.
        self.ahead, self.after = (
            np.stack([getattr(option, name) for option in options]).transpose(1, 0, 2)[:, None].copy()
            for name in ("ahead", "after")
        )


class Tables:
    """The options of a world as arrays.

    Attributes:
        world: the world.
        finish: the turn.
    """

    def __init__(self, world: World) -> None:
        self.world, self.finish = world, Finish(world)
        self.known: dict[tuple[Option, ...], Choices] = {}
        self.at: dict[tuple[int, int], Choices | None] = {}

    def choices(self, border: int, longest: int) -> Choices | None:
        """What may begin at a border, ``None`` if nothing does."""
        if (border, longest) not in self.at:
            self.at[border, longest] = self.of(self.world.options(border, longest))
        return self.at[border, longest]

    def of(self, options: tuple[Option, ...]) -> Choices | None:
        """Options as arrays, each tuple once."""
        if options and options not in self.known:
            self.known[options] = Choices(options)
        return self.known.get(options)


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
    """All labels at a border times all its options.

    Attributes:
        labels: that they make: (labels, options, columns).
        high: most bytes alive in what is decided now: (labels, options).
    """

    labels: Column
    high: Column


def extend(world: World, border: int, labels: Column, chosen: Choices) -> Extension:
    """Each label at a border with each option behind it."""
    size = chosen.bytes
    found = np.empty((len(labels), len(chosen.options), NUM_COLUMNS), np.int64)
    found[:, :, :NUM_FORWARD] = _moved(labels[:, None, :NUM_FORWARD], chosen.forward)
    dual = _moved(labels[:, None, DUAL : DUAL + NUM_BACKWARD], chosen.after)
    dual = prefetch(dual, labels[:, None], world.is_serial)
    found[:, :, DUAL : DUAL + NUM_BACKWARD] = _moved(dual, chosen.ahead)
    held, kept, deferred, ahead, cast, pending = (
        labels[:, column, None] for column in (HELD, KEPT, DEFERRED, AHEAD, CAST, PENDING)
    )
    before = world.forward_level[border] + (held, kept, np.minimum(held, kept))[world.settled[border]]
    found[:, :, HELD], found[:, :, KEPT] = held + size["held"], kept + size["kept"]
    found[:, :, DEFERRED : GATHER_NS + 1] = chosen.own
    level = found[:, :, KEPT] + world.backward_levels[border + size["length"]]
    high = np.maximum(before + np.maximum(size["deferred_top"] + deferred, size["forward_top"]), 0)
    high = np.maximum(high, pending + size["input_bytes"])
    high = np.maximum(high, level + size["closed_top"] + ahead)
    while_pending = np.maximum(size["open_top"], size["pending_top"] + ahead)
    issued = size["prefetch_level"] + np.where(ahead > 0, ahead + cast, 0)
    found[:, :, PENDING] = level + np.maximum(while_pending, issued)
    return Extension(found, high)


def prefetch(dual: Column, labels: Column, is_serial: bool) -> Column:
    """The dual clocks before the prefetch of each label's last unit, from those after it; clocks are the last axis."""
    is_gathered = labels[..., AHEAD] > 0
    copy_in_ns, gather_ns = labels[..., COPY_IN], labels[..., GATHER_NS]
    if is_serial:
        latest = dual[..., _B["arrival"]]
        for name in _LEVELLED:
            latest = np.maximum(latest, dual[..., _B[name]])
        latest = np.where(is_gathered, latest + copy_in_ns + gather_ns, latest)
        for name in _LEVELLED:
            dual[..., _B[name]] = latest
    else:
        host, gather, shard = dual[..., _B["host"]], dual[..., _B["gather"]], dual[..., _B["shard"]]
        arrived = np.maximum(shard, dual[..., _B["arrival"]]) + gather_ns
        copied = np.maximum(gather, arrived) + copy_in_ns
        dual[..., _B["host"]] = np.where(is_gathered, np.maximum(host, copied), host)
        dual[..., _B["shard"]] = np.where(is_gathered, arrived, shard)
        dual[..., _B["gather"]] = np.where(is_gathered, copied, gather)
    dual[..., _B["arrival"]] = NEVER
    found: Column = np.maximum(dual, NEVER)
    return found


def _moved(clocks: Column, matrices: Column) -> Column:
    """Clocks behind a piece, from those before it: (labels, 1 or options, clocks) to (labels, options, clocks)."""
    binding = np.nonzero(clocks.max((0, 1), initial=NEVER) > NEVER)[0]
    if not len(binding):
        return np.full((len(clocks), *matrices.shape[2:]), NEVER, np.int64)
    terms: Column = clocks.transpose(2, 0, 1)[binding][..., None] + matrices[binding]
    found: Column = np.maximum(terms.max(0), NEVER)
    return found


class Finish:
    """The turn, for labels at the end of the chain."""

    def __init__(self, world: World) -> None:
        turn = world.turn
        self.turn, self.level, self.is_serial = turn, world.forward_level[-1], world.is_serial
        self.before, self.after = turn.before[:, None, None], turn.after[:, None, None]

    def __call__(self, labels: Column) -> tuple[Column, Column]:
        """Step time of each label, and most bytes alive from the turn on."""
        turn = self.turn
        dual = _moved(labels[:, None, DUAL : DUAL + NUM_BACKWARD], self.after)
        dual = _moved(prefetch(dual, labels[:, None], self.is_serial), self.before)
        step_ns = (dual[:, 0] + labels[:, :NUM_FORWARD]).max(1)
        ahead = labels[:, AHEAD]
        level = self.level + labels[:, KEPT]
        high = np.maximum(level + turn.deferred_top + labels[:, DEFERRED], level + turn.top)
        high = np.maximum(high, level + turn.pending_top + ahead)
        high = np.maximum(high, np.where(ahead > 0, level + turn.prefetch_level + ahead + labels[:, CAST], 0))
        return step_ns, np.maximum(high, labels[:, PENDING])


def price(tables: Tables, start: Start, options: Sequence[Option]) -> tuple[int, int]:
    """Step time and peak of one plan: a start and options that reach from border to border."""
    label, high, border = start_label(start)[None, :], start.high, start.stop
    for option in options:
        one = tables.of((option,))
        assert one is not None
        extension = extend(tables.world, border, label, one)
        high = max(high, int(extension.high[0, 0]))
        label, border = extension.labels[0], border + option.length
    step_ns, last = tables.finish(label)
    return int(step_ns[0]), max(high, int(last[0]))
