"""The world of the sweep: a chain with the price of every unit that may stand on it, entered from the fold's numbers.

Frozen and whole: integers and matrices, nothing of the model but names. An *option* is a unit with all its decisions on
its stretch of the chain; a *start* is what stands before the first option: the root's own unit, and the units at the
head whose gradients stay to the end of backward. Sums over parameters do not depend on how these are grouped, so every
border of the chain has levels that hold for all plans: the bytes alive there but for what the plan keeps before it.
Where what a place keeps depends on whether another one recomputes, the world counts the least, so that it is never
worse than the fold: its best plan bounds all, and is theirs if the fold gives it the same price.
"""

from dataclasses import dataclass

from autoshard.analysis.space import Analysis
from autoshard.ir import ModelGraph
from autoshard.plan.schema import Decisions
from autoshard.planner.chain import Chain, Place
from autoshard.planner.clocks import Matrix, Row
from autoshard.request import Question
from autoshard.simulate import StepProfile, Timeline


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A unit with its decisions. Bytes are relative to the level of the border at which the unit stops.

    Attributes:
        first: border at which it begins.
        stop: border at which it stops.
        modules: its members.
        reshard: reshard after forward.
        recompute: members that recompute.
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
        work: what it adds at least on the compute stream, the communicator and the host to the ops that all plans run,
            as sums over its members.
    """

    first: int
    stop: int
    modules: tuple[str, ...]
    reshard: bool
    recompute: tuple[str, ...]
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
    work: tuple[int, int, int]


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
class World:
    """The whole of it.

    Attributes:
        chain: the chain.
        pieces: its outermost places behind those at the head that stay to the end, as far as they may be parted.
        parts: the same of the places inside one, by its module.
        starts: what may stand before the first option.
        options: by border at which they begin.
        turn: forward to backward.
        forward_level: by border: bytes alive in forward beside what is kept.
        backward_level: by border: the same in backward.
        reshards_root: the root reshards after forward.
        has_input: every unit has gradients to reduce, over more than one shard.
        replicas: size of the replicate axis.
        is_serial: nothing overlaps.
        ops_after: by border: time of the ops behind it in forward and backward that all plans run, on the compute
            stream, the communicator and the host.
        floor: by border: least bytes alive in backward beside what is kept, while the place that ends there computes.
        settled: by border: what forward holds there is what was kept in forward (0), to backward (1), or the lesser of
            the two (2).
    """

    chain: Chain
    pieces: tuple[tuple[Place, ...], ...]
    parts: dict[str, tuple[tuple[Place, ...], ...]]
    starts: tuple[Start, ...]
    options: tuple[tuple[Option, ...], ...]
    turn: Turn
    forward_level: tuple[int, ...]
    backward_level: tuple[int, ...]
    reshards_root: bool
    has_input: bool
    replicas: int
    is_serial: bool
    settled: tuple[int, ...]
    ops_after: tuple[tuple[int, int, int], ...]
    floor: tuple[int, ...]


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
