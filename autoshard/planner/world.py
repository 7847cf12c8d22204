"""The world of the sweep: a chain with the price of every unit that may stand on it, entered from the fold's numbers.

Frozen and whole: integers and matrices, nothing of the model but names. An *option* is a unit with all its decisions on
its stretch of the chain; a *start* is what stands before the first option: the root's own unit, and the units at the
head whose gradients stay to the end of backward. Sums over parameters do not depend on how these are grouped, so every
border of the chain has levels that hold for all plans: the bytes alive there but for what the plan keeps before it.
Where what a place keeps depends on whether another one recomputes, the world counts the least, so that it is never
worse than the fold: its best plan bounds all, and is theirs if the fold gives it the same price.
"""

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.analysis.space import Analysis
from autoshard.ir import ModelGraph
from autoshard.plan.schema import Decisions
from autoshard.planner.chain import Chain, Place
from autoshard.planner.clocks import Matrix, Row
from autoshard.request import Question
from autoshard.simulate import StepProfile, Timeline

Work = tuple[int, int, int]
"""Times on the compute stream, the communicator and the host."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A unit with its decisions, wherever on the chain one like it stands.

    Bytes are relative to the level of the border at which the unit stops.

    Attributes:
        level: 0 for a unit of outermost pieces, 1 for one of the parts of one that is cut.
        count: pieces that it is made of.
        length: borders from its first to where it stops.
        reshard: reshard after forward.
        again: by place: it recomputes.
        forward: its forward, clocks to clocks.
        ahead: its backward up to the prefetch of the unit before it.
        after: the rest of its backward.
        forward_top: most bytes alive in forward, relative to the level where it begins.
        deferred_top: the same while the buffer of the unit before it is alive.
        held: bytes that it keeps in forward more than a unit that reshards and does not recompute.
        kept: the same from forward to backward. (The two differ by what forward keeps anyway, and backward does not.)
        open_top: most bytes alive in backward before the prefetch of the unit before it, while the reduce-scatter
            input of the unit after it is alive.
        prefetch_level: bytes alive as that prefetch is issued.
        pending_top: most bytes alive while both are.
        ops_top: the same, as far as its ops go.
        closed_top: most bytes alive after that input is gone, with the prefetched buffer.
        buffer_bytes: of its all-gather.
        cast_bytes: copy of its shards while the all-gather is issued.
        copy_in_ns: time to copy its shards into the buffer.
        gather_ns: time of its all-gather.
        input_bytes: its reduce-scatter input.
        reduces: it has gradients to reduce.
        work: what it adds at least to the ops that all plans run, in forward and in backward, the hook of its backward
            left out, as sums over its members.
    """

    level: int
    count: int
    length: int
    reshard: bool
    again: tuple[bool, ...]
    forward: Matrix
    ahead: Matrix
    after: Matrix
    forward_top: int
    deferred_top: int
    held: int
    kept: int
    open_top: int
    prefetch_level: int
    pending_top: int
    ops_top: int
    closed_top: int
    buffer_bytes: int
    cast_bytes: int
    copy_in_ns: int
    gather_ns: int
    input_bytes: int
    reduces: bool
    work: tuple[Work, Work]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """What stands before the first option.

    Attributes:
        stop: border at which it stops.
        units: units at the head: modules and whether they reshard.
        recompute: modules of them that recompute.
        clocks: forward clocks there.
        dual: from the backward clocks there, the longest path to the end of the step.
        held: bytes kept in forward.
        kept: bytes kept to backward.
        pending: most bytes alive in backward while the reduce-scatter input of the next unit is.
        high: most bytes alive otherwise.
        deferred_bytes: last all-gather buffer.
        ahead_bytes: buffer of the last unit's prefetch in backward, 0 if it keeps its parameters.
        cast_bytes: copy of its shards while that is issued.
        copy_in_ns: time to copy its shards into the buffer.
        gather_ns: time of its all-gather.
    """

    stop: int
    units: tuple[tuple[tuple[str, ...], bool], ...]
    recompute: tuple[str, ...]
    clocks: Row
    dual: Row
    held: int
    kept: int
    pending: int
    high: int
    deferred_bytes: int
    ahead_bytes: int
    cast_bytes: int
    copy_in_ns: int
    gather_ns: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """From the end of the chain in forward to its end in backward, the prefetch of the last unit in between.

    Attributes:
        before: clocks of forward to clocks of backward, up to that prefetch.
        after: the rest.
        deferred_top: most bytes alive while the last all-gather's buffer is, relative to the level of forward there.
        top: the same without it.
        prefetch_level: bytes alive as the prefetch is issued.
        pending_top: most bytes alive beside the prefetched buffer.
    """

    before: Matrix
    after: Matrix
    deferred_top: int
    top: int
    prefetch_level: int
    pending_top: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Places that are never parted.

    Attributes:
        places: in execution order.
        first: border at which it begins.
        stop: border at which it stops.
        kind: pieces of one kind have the same numbers.
    """

    places: tuple[Place, ...]
    first: int
    stop: int
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Siblings:
    """Pieces beside each other.

    Attributes:
        pieces: in execution order.
        joins: by piece: it may share a unit with the next one.
        level: 0 for the outermost pieces, 1 for the parts of one.
    """

    pieces: tuple[Piece, ...]
    joins: tuple[bool, ...]
    level: int

    def window(self, index: int, longest: int) -> tuple[Piece, ...]:
        """Up to ``longest`` pieces from one on that may share a unit."""
        stop = index + 1
        while stop - index < longest and self.joins[stop - 1]:
            stop += 1
        return self.pieces[index:stop]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """The whole of it; options and starts are made as they are asked for, by the length of their groups.

    Attributes:
        chain: the chain.
        rows: its outermost places behind those at the head that stay to the end, as far as they may be parted; then
            the same of the places inside each that is cut.
        turn: forward to backward.
        forward_level: by border: bytes alive in forward beside what is kept.
        backward_level: by border: the same in backward.
        backward_levels: the same as an array.
        reshards_root: the root reshards after forward.
        has_input: every unit has gradients to reduce, over more than one shard.
        replicas: size of the replicate axis.
        is_serial: nothing overlaps.
        ops_after: by border: time of the ops behind it that all plans run, in forward and in backward.
        unit_host_ns: host time of a unit's hooks in one direction.
        floor: by border: least bytes alive in backward beside what is kept, whatever the units behind it are.
        behind: by piece, as the borders between which it stands: bytes that it adds to the floor at its first border
            at least, while the place before it computes.
        settled: by border: what forward holds there is what was kept in forward (0), to backward (1), or the lesser of
            the two (2).
        make_options: of a border, with groups of up to so many pieces.
        make_starts: with groups of up to so many pieces.
    """

    chain: Chain
    rows: tuple[Siblings, ...]
    turn: Turn
    forward_level: tuple[int, ...]
    backward_level: tuple[int, ...]
    backward_levels: Row
    reshards_root: bool
    has_input: bool
    replicas: int
    is_serial: bool
    settled: tuple[int, ...]
    ops_after: tuple[tuple[Work, Work], ...]
    unit_host_ns: int
    floor: tuple[int, ...]
    behind: dict[tuple[int, int], int]
    make_options: Callable[[int, int], tuple[Option, ...]]
    make_starts: Callable[[int], tuple[Start, ...]]

    def options(self, border: int, longest: int) -> tuple[Option, ...]:
        """What may begin at a border; the same tuple for borders that are alike."""
        return self.make_options(border, longest)

    def starts(self, longest: int) -> tuple[Start, ...]:
        """What may stand before the first option."""
        return self.make_starts(longest)

    def modules(self, border: int, option: Option) -> tuple[str, ...]:
        """The modules of an option at a border."""
        for row in self.rows:
            if row.level == option.level and row.pieces[0].first <= border < row.pieces[-1].stop:
                index = next(place for place, piece in enumerate(row.pieces) if piece.first == border)
                members = row.pieces[index : index + option.count]
                return tuple(place.module for piece in members for place in piece.places)
        raise LookupError(f"no unit of level {option.level} begins at border {border}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a world is made from beside its chain, the same for all group lengths.

    Attributes:
        graph: the model.
        analysis: facts about it.
        question: what is asked.
        profile: of the step in which nothing recomputes.
        again: of the step in which everything that may does, ``None`` to leave recompute out.
        reference: the step under the plan that makes each outermost place a unit.
        decisions: that plan.
    """

    graph: ModelGraph
    analysis: Analysis
    question: Question
    profile: StepProfile
    again: StepProfile | None
    reference: Timeline
    decisions: Decisions
