"""How a world is written down: each unit's piece of the step, event by event, from the numbers of the fold.

Long, since one unit's forward, backward, its place at either end of the step and what it shares with like units are one
account: each byte that one of these functions allocates another one frees.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from autoshard.analysis.space import LegalSpace
from autoshard.cost import gather_wires, scatter_wires
from autoshard.planner.chain import Chain, Place, every_place, groups, pieces
from autoshard.planner.clocks import BACKWARD, FORWARD, Clocks, Matrix
from autoshard.planner.stock import Stock
from autoshard.planner.track import AHEAD, DEFERRED, INPUT, Track
from autoshard.planner.world import Frame, Option, Piece, Siblings, Start, Turn, Work, World
from autoshard.simulate import Setup, UnitSizes
from autoshard.simulate.units import Reduction

ALL_MASKS = 4
"""In a unit of at most so many places each set of them may recompute; in a longer one the first ones do."""

LOW = -(1 << 62)
"""In place of a peak where there is nothing."""


def build_world(frame: Frame, chain: Chain, stock: Stock) -> World:
    """The world of a chain."""
    return _Builder(frame, chain, stock).world()


class _Builder:
    """Numbers of one chain; units of like places are written down once, and only those that are asked for."""

    def __init__(self, frame: Frame, chain: Chain, stock: Stock) -> None:
        self.frame, self.chain, self.stock = frame, chain, stock
        setup: Setup = frame.reference.setup
        self.setup, self.root = setup, setup.units[-1]
        self.is_serial = setup.is_serial
        self.plain, self.again = stock.plain, stock.again
        self.unit, self.repeat = stock.unit, stock.repeat
        self.rows = self._rows()
        self.forward_level, self.backward_level = self._levels()
        self.begins: list[list[tuple[Siblings, int]]] = [[] for _ in range(chain.num_borders)]
        for row in self.rows:
            for index, piece in enumerate(row.pieces):
                self.begins[piece.first].append((row, index))
        self.known: dict[tuple[int, ...], tuple[Option, ...]] = {}
        self.at_border: dict[tuple[tuple[int, ...], ...], tuple[Option, ...]] = {}
        self.heads: dict[int, tuple[Start, ...]] = {}

    def world(self) -> World:
        """All that is not written down on demand."""
        chain = self.chain
        floor, behind = self._floors()
        every = [piece.places for row in self.rows for piece in row.pieces]
        return World(
            chain=chain,
            rows=self.rows,
            turn=self._turn(),
            forward_level=self.forward_level,
            backward_level=self.backward_level,
            backward_levels=np.array(self.backward_level, np.int64),
            reshards_root=self.root.reshard,
            has_input=self.root.num_shards > 1 and all(self.unit(piece)[1] is not None for piece in every),
            replicas=self.setup.num_replicas,
            is_serial=self.is_serial,
            settled=self._settled(),
            ops_after=tuple(self._ops_after(border) for border in range(chain.num_borders)),
            unit_host_ns=self.setup.unit_host_ns,
            floor=floor,
            behind=behind,
            make_options=self.options,
            make_starts=self.starts,
        )

    def _rows(self) -> tuple[Siblings, ...]:
        """The outermost places behind those at the head that stay to the end, and the parts of each that is cut."""
        space, regular = self.frame.analysis.space, self.chain.places[self.chain.num_deferred :]
        if not regular:
            return ()
        outer = pieces(regular, space)
        cut = [pieces(piece[0].parts, space) for piece in outer if len(piece) == 1 and piece[0].parts]
        return tuple(self._row(row, level=int(index > 0)) for index, row in enumerate([outer, *cut]))

    def _row(self, row: tuple[tuple[Place, ...], ...], level: int) -> Siblings:
        joins = [(one[-1].module, two[0].module) in self.stock.pairs for one, two in pairwise(row)]
        found = tuple(
            Piece(places=places, first=places[0].first, stop=places[-1].stop, kind=self._likeness(places))
            for places in row
        )
        return Siblings(pieces=found, joins=(*joins, False), level=level)

    def _ops_after(self, border: int) -> tuple[Work, Work]:
        chain = self.chain
        forward = self._ops(chain.entered[border], chain.entered[-1])
        return forward, self._ops(chain.left[-1], chain.left[border])

    def _ops(self, first: int, stop: int) -> Work:
        profile = self.plain.profile
        compute = profile.elapsed_ns[stop] - profile.elapsed_ns[first]
        return self._streams(compute, 0, profile.launch_ns * (profile.launched[stop] - profile.launched[first]))

    # -- levels

    def _levels(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes alive at each border beside what is kept; the root's unsharded parameters are in both."""
        chain = self.chain
        base = sum(self.frame.reference.start.live) - self.frame.profile.between[0] + self.root.unsharded_bytes
        leaves = [place for place in every_place(chain.places) if not place.parts]
        reduced = [0] * chain.num_borders
        for leaf in reversed(leaves):
            reduced[leaf.first] = reduced[leaf.stop] + (0 if leaf.defers else self.stock.reduced((leaf,)))
        forward = tuple(base + int(self.plain.level[at]) for at in chain.entered)
        backward = tuple(base + int(self.plain.level[at]) + reduced[border] for border, at in enumerate(chain.left))
        return forward, backward

    def _floors(self) -> tuple[tuple[int, ...], dict[tuple[int, int], int]]:
        """Least bytes alive in backward at each border beside what is kept, and what the piece behind it adds to them.

        A piece has reduced its gradients, which are on their way while the one before it computes, or it shares a unit
        with that one and is still unsharded. Those further behind hold at least their gradients, whole or as shards.
        """
        chain = self.chain
        leaves = [place for place in every_place(chain.places) if not place.parts]
        least = [0] * chain.num_borders
        for leaf in reversed(leaves):
            least[leaf.first] = least[leaf.stop] + (0 if leaf.defers else min(self.stock.reduced((leaf,)), 0))
        behind: dict[tuple[int, int], int] = {}
        for row in self.rows:
            joins = False
            for piece, joins_next in zip(row.pieces, row.joins, strict=True):
                unit, reduction = self.unit(piece.places)
                here = self.stock.reduced(piece.places) + (reduction.input_bytes if reduction is not None else 0)
                if joins:
                    here = min(here, unit.unsharded_bytes)
                here = max(here + least[piece.stop] - least[piece.first], 0)
                step = piece.first, piece.stop
                behind[step] = min(here, behind.get(step, here))
                joins = joins_next
        base = self.backward_level[-1] - int(self.plain.level[chain.left[-1]])
        floor = tuple(base + int(self.plain.level[at]) + least[border] for border, at in enumerate(chain.left))
        return floor, behind

    def _settled(self) -> tuple[int, ...]:
        """By border: what forward holds there is what was kept in forward (0), to backward (1), or the lesser (2)."""
        found = [0] * self.chain.num_borders
        if self.again is None:
            return tuple(found)
        held = kept = 0
        for place in self.chain.places:
            again = self.repeat(place)
            if again is not None:
                held, kept = held + again.held, kept + again.kept
            at = self.chain.entered[place.stop]
            more = int(self.again.level[at] - self.plain.level[at])
            found[place.stop] = 0 if more == held else 1 if more == kept else 2
            for border in range(place.first + 1, place.stop):
                found[border] = found[place.first]
        return tuple(found)

    def _track(self, names: tuple[str, ...], marks: int) -> Track:
        return Track(Clocks.start(names, self.is_serial), self.setup.num_replicas, marks=marks)

    def _run(self, track: Track, first: int, stop: int) -> None:
        track.run(self.plain.stretch(first, stop))

    # -- options

    def options(self, border: int, longest: int) -> tuple[Option, ...]:
        """Units of up to ``longest`` neighbours that begin at a border; those of like borders are the same ones."""
        windows = [(row.level, row.window(index, longest)) for row, index in self.begins[border]]
        key = tuple((level, *self._kinds(window)) for level, window in windows)
        if key not in self.at_border:
            found: list[Option] = []
            for level, window in windows:
                for count in range(1, len(window) + 1):
                    found += self._options(level, window[:count])
            self.at_border[key] = tuple(found)
        return self.at_border[key]

    def _options(self, level: int, window: tuple[Piece, ...]) -> tuple[Option, ...]:
        key = level, *self._kinds(window)
        known = self.known if key[1] else self.stock.options
        if key not in known:
            known[key] = tuple(self._thin(self._new_options(level, window)))
        return known[key]

    def _kinds(self, window: tuple[Piece, ...]) -> tuple[int, ...]:
        """What the numbers of its options depend on: whether it is the last, and its kinds."""
        return int(window[-1].stop == self.chain.num_borders - 1), *(piece.kind for piece in window)

    def _likeness(self, piece: tuple[Place, ...]) -> int:
        """What an option's numbers depend on: kinds of places and of the ops around them."""
        chain, stock = self.chain, self.stock
        at, left = chain.entered[piece[0].first], chain.left[piece[-1].stop]
        found = []
        for place in piece:
            found += [stock.between(at, place.forward[0]), stock.kind(place)]
            at = place.forward[1]
        found.append(stock.between(at, chain.entered[piece[-1].stop]))
        for place in reversed(piece):
            found.append(stock.between(left, place.backward[0]))
            left = place.backward[1]
        found.append(stock.between(left, chain.left[piece[0].first]))
        found += [place.stop - place.first for place in piece]
        return stock.number(tuple(found))

    def _new_options(self, level: int, window: tuple[Piece, ...]) -> Iterator[Option]:
        members = tuple(place for piece in window for place in piece.places)
        for again in self._masks(members):
            for reshard in self._reshards(members):
                yield self._option(level, len(window), members, again, reshard)

    def _reshards(self, members: Sequence[Place]) -> tuple[bool, ...]:
        asked = self.frame.question.reshard
        if asked == "always" or not self.stock.must_reshard.isdisjoint(key for place in members for key in place.keys):
            return (True,)
        return (False,) if asked == "never" else (True, False)

    def _masks(self, members: Sequence[Place]) -> Iterator[tuple[bool, ...]]:
        """Which members recompute."""
        asked = self.frame.question.recompute
        may = [place.recomputes and self.repeat(place) is not None for place in members]
        if asked == "none" or self.again is None:
            yield (False,) * len(members)
        elif asked == "full":
            yield tuple(may)
        elif sum(may) <= ALL_MASKS:
            yield from product(*((False, True) if each else (False,) for each in may))
        else:
            for count in range(sum(may) + 1):
                left = iter(range(sum(may)))
                yield tuple(each and next(left) < count for each in may)

    def _option(
        self, level: int, count: int, members: tuple[Place, ...], again: tuple[bool, ...], reshard: bool
    ) -> Option:
        unit, reduction = self.unit(members)
        forward = self._track(FORWARD, DEFERRED)
        held, kept = self._forward(forward, members, again, unit, reshard)
        backward = self._track(BACKWARD, INPUT)
        backward.live -= self._root_missing(members)
        if reshard:
            backward.live += unit.buffer_bytes
        hole, ops_top = self._backward(backward, members, again, unit, reduction, reshard)
        tops = backward.tops
        return Option(
            level=level,
            count=count,
            length=members[-1].stop - members[0].first,
            reshard=reshard,
            again=again,
            forward=forward.clocks.matrix(FORWARD),
            ahead=hole[0],
            ops_top=ops_top,
            after=backward.clocks.matrix(BACKWARD),
            forward_top=forward.tops.get(0, LOW),
            deferred_top=forward.tops.get(DEFERRED, LOW),
            held=held,
            kept=kept,
            open_top=tops.get(INPUT, LOW),
            prefetch_level=hole[1],
            pending_top=tops.get(INPUT | AHEAD, LOW),
            closed_top=tops.get(AHEAD, LOW),
            buffer_bytes=unit.buffer_bytes,
            cast_bytes=unit.cast_bytes,
            copy_in_ns=unit.copy_in_ns,
            gather_ns=unit.gather_ns,
            input_bytes=backward.input_bytes,
            reduces=reduction is not None,
            work=self._works(members, again, unit, reduction, reshard),
        )

    def _works(
        self,
        members: Sequence[Place],
        again: Sequence[bool],
        unit: UnitSizes,
        reduction: Reduction | None,
        reshard: bool,
    ) -> tuple[Work, Work]:
        """Time in forward and backward that no plan with this unit avoids, beside the ops that all plans run."""
        more = [0, len(members) * self.setup.unit_host_ns], [0, 0]
        for place, repeats in zip(members, again, strict=True):
            found = self.repeat(place) if repeats else None
            if found is not None:
                forward, backward = self.plain.stretch(*place.forward), self.plain.stretch(*place.backward)
                for spent, plain, pieces_again in zip(
                    more, (forward, backward), ((found.forward,), found.pieces), strict=True
                ):
                    spent[0] += sum(piece.compute_ns for piece in pieces_again) - plain.compute_ns
                    spent[1] += sum(piece.launch_ns for piece in pieces_again) - plain.launch_ns
        gather = min(gather_wires(unit.buffer_bytes, unit.shard), default=0)
        scatter = copy = 0
        if reduction is not None:
            scatter, copy = min(scatter_wires(reduction.input_bytes, unit.shard), default=0), reduction.copy_ns
        return (
            self._streams(more[0][0] + unit.copy_out_ns, gather, more[0][1], unit.copy_in_ns),
            self._streams(
                more[1][0] + reshard * unit.copy_out_ns + copy,
                reshard * gather + scatter,
                more[1][1],
                reshard * unit.copy_in_ns,
            ),
        )

    def _streams(self, compute: int, wires: int, launch: int, copies: int = 0) -> Work:
        """Times by stream; where nothing overlaps their sum on each."""
        if self.is_serial:
            return (compute + wires + launch + copies,) * 3
        return compute, wires, launch

    def _forward(
        self, track: Track, members: Sequence[Place], again: Sequence[bool], unit: UnitSizes, reshard: bool
    ) -> tuple[int, int]:
        """Forward of a unit from border to border; bytes that it keeps in forward and to backward."""
        at = self.chain.entered[members[0].first]
        held = kept = 0 if reshard else unit.unsharded_bytes
        for index, (place, repeats) in enumerate(zip(members, again, strict=True)):
            self._run(track, at, place.forward[0])
            track.hook(self.setup.unit_host_ns)
            if index == 0:
                track.gather(unit)
                track.copy_out(unit, is_deferred=True)
            if repeats:
                found = self.repeat(place)
                assert found is not None
                track.run(found.forward)
                held, kept = held + found.held, kept + found.kept
            else:
                self._run(track, *place.forward)
            track.split()
            at = place.forward[1]
        if reshard:
            track.free(unit)
        self._run(track, at, self.chain.entered[members[-1].stop])
        track.split()
        return held, kept

    def _backward(
        self,
        track: Track,
        members: Sequence[Place],
        again: Sequence[bool],
        unit: UnitSizes,
        reduction: Reduction | None,
        reshard: bool,
    ) -> tuple[tuple[Matrix, int], int]:
        """Backward of a unit; clocks and bytes as the unit before is prefetched, and most bytes while it computes."""
        at = self.chain.left[members[-1].stop]
        self._run(track, at, members[-1].backward[0])
        track.hook(self.setup.unit_host_ns)
        if reshard:
            track.copy_out(unit, is_deferred=False)
        hole = track.clocks.matrix(BACKWARD), track.live
        track.clocks = Clocks.start(BACKWARD, self.is_serial)
        track.marks |= AHEAD
        self._root_after(track, members)
        self._ops_backward(track, members, again)
        ops_top = track.tops.get(INPUT | AHEAD, LOW)
        track.post_backward(unit, reduction)
        self._run(track, members[0].backward[1], self.chain.left[members[0].first])
        track.split()
        return hole, ops_top

    def _ops_backward(self, track: Track, members: Sequence[Place], again: Sequence[bool]) -> None:
        at = members[-1].backward[0]
        for place, repeats in zip(reversed(members), reversed(again), strict=True):
            self._run(track, at, place.backward[0])
            found = self.repeat(place) if repeats else None
            if found is not None:
                for index, piece in enumerate(found.pieces):
                    if index:
                        track.split()
                    track.run(piece)
            else:
                self._run(track, *place.backward)
            at = place.backward[1]

    def _thin(self, options: Iterator[Option]) -> list[Option]:
        """Options of one unit that are not worse than another one in everything."""
        kept: list[Option] = []
        for option in sorted(options, key=lambda each: (sum(each.again), each.again)):
            if not any(_dominates(other, option) for other in kept):
                kept = [other for other in kept if not _dominates(option, other)]
                kept.append(option)
        return sorted(kept, key=lambda each: (not each.reshard, sum(each.again), each.again))

    # -- both ends

    def _prologue(self, track: Track) -> None:
        """The root's forward begins; its unsharded parameters are in the level, and not there yet."""
        first = self.chain.entered[0]
        track.live -= self.plain.stretch(0, first).end + self.root.unsharded_bytes
        self._run(track, 0, first)
        track.split()
        if self.root.keys:
            track.hook(self.setup.unit_host_ns)
            track.gather(self.root)
            track.copy_out(self.root, is_deferred=True)

    def _epilogue(self, track: Track, deferred: Sequence[tuple[UnitSizes, Reduction | None]]) -> None:
        """The final callback and the optimizer: the root first, then what stayed to the end."""
        waiting = [*([(self.root, self.stock.reduction(self.root))] if self.root.keys else ()), *deferred]
        for unit, reduction in waiting:
            track.post_backward(unit, reduction)
            track.clocks.finish()
        if not waiting:
            track.clocks.finish()
        track.release()
        track.clocks.optimize(self.setup.optimizer.step_ns)

    def starts(self, longest: int) -> tuple[Start, ...]:
        """What may stand before the first option, where units have up to ``longest`` neighbours."""
        if longest not in self.heads:
            self.heads[longest] = tuple(self._starts(longest))
        return self.heads[longest]

    def _starts(self, longest: int) -> Iterator[Start]:
        head = self.chain.places[: self.chain.num_deferred]
        if not head:
            yield self._start(())
            return
        for cut in _partitions(self.chain, self.frame.analysis.space, longest):
            choices = [
                [(members, again, reshard) for again in self._masks(members) for reshard in self._reshards(members)]
                for members in cut
            ]
            for chosen in product(*choices):
                yield self._start(chosen)

    def _start(self, chosen: Sequence[tuple[tuple[Place, ...], tuple[bool, ...], bool]]) -> Start:
        """The root, and these units whose gradients stay to the end."""
        stop = chosen[-1][0][-1].stop if chosen else 0
        forward = self._track(("compute",), 0)
        zero = np.zeros(1, np.int64)
        forward.clocks.host = forward.clocks.gather = forward.clocks.shard = zero
        self._prologue(forward)
        backward = self._track(BACKWARD, INPUT)
        held = kept = 0
        units = []
        for members, again, reshard in chosen:
            unit, reduction = self.unit(members)
            more_held, more_kept = self._forward(forward, members, again, unit, reshard)
            held, kept = held + more_held, kept + more_kept
            units.append((unit, reduction))
        if chosen:
            backward.live -= self._root_missing(chosen[-1][0])
            backward.live += units[-1][0].buffer_bytes if chosen[-1][2] else 0
        for index in reversed(range(len(chosen))):
            members, again, reshard = chosen[index]
            unit = units[index][0]
            before = units[index - 1][0] if index and chosen[index - 1][2] else None
            self._deferred_backward(backward, members, again, unit, reshard, before)
        self._epilogue(backward, units)
        level = self.backward_level[stop] + kept
        high = self.forward_level[0] + max(forward.tops.values(), default=0)
        closed = [top for marks, top in backward.tops.items() if not marks & INPUT]
        optimizer = backward.live + self.setup.optimizer.temporary_bytes
        open_tops = [top for marks, top in backward.tops.items() if marks & INPUT]
        last = units[-1][0] if units else None
        is_ahead = bool(chosen) and chosen[-1][2]
        return Start(
            stop=stop,
            units=tuple((tuple(place.module for place in members), reshard) for members, _, reshard in chosen),
            recompute=tuple(
                place.module for members, again, _ in chosen for place, each in zip(members, again, strict=True) if each
            ),
            clocks=forward.clocks.matrix(FORWARD)[:, 0],
            dual=np.maximum(backward.clocks.compute, backward.clocks.host),
            held=held,
            kept=kept,
            pending=level + max(open_tops, default=0),
            high=max(high, level + max([optimizer, *closed])),
            deferred_bytes=forward.deferred_bytes,
            ahead_bytes=last.buffer_bytes if last is not None and is_ahead else 0,
            cast_bytes=last.cast_bytes if last is not None and is_ahead else 0,
            copy_in_ns=last.copy_in_ns if last is not None and is_ahead else 0,
            gather_ns=last.gather_ns if last is not None and is_ahead else 0,
        )

    def _deferred_backward(
        self,
        track: Track,
        members: Sequence[Place],
        again: Sequence[bool],
        unit: UnitSizes,
        reshard: bool,
        before: UnitSizes | None,
    ) -> None:
        """Backward of a unit whose gradients stay: it is neither resharded nor reduced."""
        at = self.chain.left[members[-1].stop]
        self._run(track, at, members[-1].backward[0])
        track.hook(self.setup.unit_host_ns)
        if reshard:
            track.copy_out(unit, is_deferred=False)
        if before is not None:
            track.gather(before)
        self._root_after(track, members)
        self._ops_backward(track, members, again)
        self._run(track, members[0].backward[1], self.chain.left[members[0].first])

    def _turn(self) -> Turn:
        profile, root = self.frame.profile, self.root
        run = profile.runs[""][0]
        assert run.backward is not None
        track = self._track(FORWARD, DEFERRED)
        last = self.chain.num_borders - 1
        self._run(track, self.chain.entered[last], run.forward[1])
        track.split()
        if root.keys and root.reshard:
            track.free(root)
        track.flush()
        self._run(track, run.forward[1], profile.num_forward)
        track.split()
        self._run(track, profile.num_forward, run.backward[0])
        track.split()
        is_root_first = bool(root.keys) and not self._is_root_last()
        if is_root_first:
            self._root_pre_backward(track)
            before, level = self._hole(track)
        self._run(track, run.backward[0], self.chain.left[last])
        if not is_root_first:
            # The last unit gathers itself, after its own hook; the hook's time is taken back for the option to spend.
            ahead_ns = 0 if self.is_serial else self.setup.unit_host_ns
            track.hook(ahead_ns)
            before, level = self._hole(track)
            track.clocks.host = track.clocks.host - ahead_ns
        track.split()
        return Turn(
            before=before,
            after=track.clocks.matrix(BACKWARD),
            deferred_top=track.tops.get(DEFERRED, LOW),
            top=track.tops.get(0, LOW),
            prefetch_level=level,
            pending_top=track.tops.get(AHEAD, LOW),
        )

    def _is_root_last(self) -> bool:
        """Backward enters the root and its last unit by one tensor, on which the inner module's hook stands first."""
        run = self.frame.profile.runs[""][0]
        return run.backward is not None and run.backward[0] == self.chain.left[-1]

    def _root_missing(self, members: Sequence[Place]) -> int:
        """Bytes of the root's parameters, where it gathers them again only after this unit did."""
        is_last = members[-1].stop == self.chain.num_borders - 1
        return self.root.unsharded_bytes if is_last and self.root.reshard and self._is_root_last() else 0

    def _root_after(self, track: Track, members: Sequence[Place]) -> None:
        if self.root.keys and members[-1].stop == self.chain.num_borders - 1 and self._is_root_last():
            self._root_pre_backward(track)

    def _root_pre_backward(self, track: Track) -> None:
        track.hook(self.setup.unit_host_ns)
        if self.root.reshard:
            track.gather(self.root)
            track.copy_out(self.root, is_deferred=False)

    def _hole(self, track: Track) -> tuple[Matrix, int]:
        track.split()
        before = track.clocks.matrix(BACKWARD)
        track.clocks = Clocks.start(BACKWARD, self.is_serial)
        track.marks |= AHEAD
        return before, track.live


def _partitions(chain: Chain, space: LegalSpace, longest: int) -> Iterator[tuple[tuple[Place, ...], ...]]:
    """Ways to make units of the places at the head; the last unit may reach beyond them."""
    places, count = chain.places, chain.num_deferred
    runs: dict[int, list[tuple[Place, ...]]] = {}
    for members in groups(places[: count + longest - 1], space, longest):
        runs.setdefault(members[0].first, []).append(members)

    def visit(border: int) -> Iterator[tuple[tuple[Place, ...], ...]]:
        if border >= count:
            yield ()
            return
        for members in runs.get(border, ()):
            for rest in visit(members[-1].stop if members[-1].stop <= count else count):
                yield (members, *rest)

    yield from visit(0)


_BYTES = ("forward_top", "deferred_top", "held", "kept", "open_top", "prefetch_level", "pending_top", "closed_top")


def _dominates(one: Option, other: Option) -> bool:
    """One option of a unit is nowhere worse than another."""
    return (
        one.reshard == other.reshard
        and all(getattr(one, name) <= getattr(other, name) for name in _BYTES)
        and bool((one.forward <= other.forward).all())
        and bool((one.ahead <= other.ahead).all())
        and bool((one.after <= other.after).all())
    )
