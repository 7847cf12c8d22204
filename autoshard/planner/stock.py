"""What the worlds of a model share, whatever the root holds: curves, sizes of units, and what is like what.

Places with like parameters and like ops are of one *kind*, and what is written down for one of them holds for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.cost import rates
from autoshard.ir.tree import Tree
from autoshard.plan.schema import Unit
from autoshard.planner.chain import Place
from autoshard.planner.track import Curve, Stretch
from autoshard.planner.world import Frame, Option
from autoshard.simulate import Links, Sizer, UnitSizes, in_fsdp_order
from autoshard.simulate.units import Reduction


@dataclass(frozen=True, slots=True)
class Again:
    """A place that recomputes.

    Attributes:
        forward: its forward.
        held: bytes that it keeps in forward more than if it did not recompute.
        kept: the same to backward.
        pieces: its backward, cut where hooks run again.
    """

    forward: Stretch
    held: int
    kept: int
    pieces: tuple[Stretch, ...]


class Stock:
    """Numbers of one model under one question.

    Attributes:
        plain: the step in which nothing recomputes.
        again: the step in which everything that may does, ``None`` to leave recompute out.
        options: of units that are not the last, by what they depend on.
    """

    def __init__(self, frame: Frame) -> None:
        graph, setup, profile, again = frame.graph, frame.reference.setup, frame.profile, frame.again
        self.space, self.decisions, self.tree = frame.analysis.space, frame.decisions, Tree.of(graph)
        root = setup.units[-1]
        reached = rates(frame.question.profile, graph.compute_dtype)
        self.sizer = Sizer(self.tree, frame.decisions, Links(shard=root.shard, replicate=root.replicate, rates=reached))
        self.plain = Curve(profile, setup.gradient_bytes)
        self.again = None if again is None else Curve(again, setup.gradient_bytes)
        self.num_replicas = setup.num_replicas
        self.moments = frozenset(moment.key for moment in profile.gradients)
        self.must_reshard = frozenset(self.space.must_reshard)
        self.pairs = frozenset(self.space.groupable)
        self.kinds: dict[str, int] = {}
        self.numbers: dict[object, int] = {}
        self.repeated: dict[str, Again | None] = {}
        self.options: dict[tuple[int, ...], tuple[Option, ...]] = {}
        self.units: dict[tuple[int, ...], tuple[UnitSizes, Reduction | None]] = {}

    def number(self, like: object) -> int:
        """A number for a value, the same for equal ones."""
        return self.numbers.setdefault(like, len(self.numbers))

    def kind(self, place: Place) -> int:
        """Places of one kind have like parameters and like ops."""
        found = self.kinds.get(place.module)
        if found is None:
            dims, params, order = self.space.shard_dims, self.tree.params, self.tree.held_order
            like = tuple(
                [
                    (
                        (param := params[key]).shape,
                        param.dtype,
                        param.requires_grad,
                        dims.get(key, 0),
                        key in self.moments,
                        key in self.must_reshard,
                    )
                    for key in sorted(place.keys, key=order.__getitem__)
                ]
            )
            ops = self.plain.stretch(*place.forward), self.plain.stretch(*place.backward)
            found = self.kinds[place.module] = self.number((like, *ops, self.repeat(place)))
        return found

    def between(self, first: int, stop: int) -> int:
        """Kind of the ops between two positions."""
        return self.number(self.plain.stretch(first, stop)) if first < stop else -1

    def unit(self, members: Sequence[Place]) -> tuple[UnitSizes, Reduction | None]:
        """Sizes of a unit of places of these kinds, and its reduction; names are those of the first such unit."""
        key = tuple([self.kind(place) for place in members])
        if key not in self.units:
            keys = tuple(key for place in members for key in place.keys)
            dims = self.space.shard_dims
            unit = Unit(
                modules=tuple(place.module for place in members),
                reshard=True,
                num_params=len(keys),
                num_bytes=0,
                digest="",
                shard_dims={key: dims[key] for key in keys if key in dims},
            )
            sizes = self.sizer.sizes(unit, in_fsdp_order(self.tree, unit, keys))
            self.units[key] = sizes, self.reduction(sizes)
        return self.units[key]

    def reduction(self, sizes: UnitSizes) -> Reduction | None:
        """The reduction of a unit's gradients."""
        present = {key for key in sizes.keys if key in self.moments}
        unused: set[str] = set()
        if self.decisions.reduce_unused:
            unused = {key for key, _ in sizes.gradients} - present
        return sizes.reduction(present, unused)

    def reduced(self, members: Sequence[Place]) -> int:
        """Bytes that are alive after a unit's reduction more than its whole gradients before it were."""
        _, reduction = self.unit(members)
        if reduction is None:
            return 0
        left = reduction.sharded_bytes
        if self.num_replicas > 1 and reduction.is_cast:
            left += reduction.output_bytes
        return left - (reduction.unsharded_bytes - reduction.zeros_bytes)

    def repeat(self, place: Place) -> Again | None:
        """How a place runs that recomputes; ``None`` if it may not, or cannot be taken by itself."""
        if place.module not in self.repeated:
            self.repeated[place.module] = self._repeat(place)
        return self.repeated[place.module]

    def _repeat(self, place: Place) -> Again | None:
        if self.again is None or not place.recomputes:
            return None
        profile = self.again.profile
        runs = profile.runs.get(place.module, ())
        if len(runs) != 1 or runs[0].backward is None:
            return None
        first, stop = runs[0].backward
        cuts = {first, stop}
        for again_first, again_stop in profile.replays.get(place.module, ()):
            if again_first < first or again_stop > stop:
                return None
            cuts |= {again_first, again_stop}
        forward = self.again.stretch(*place.forward)
        runs_again = tuple(self.again.stretch(*piece) for piece in pairwise(sorted(cuts)))
        return Again(
            forward=forward,
            held=forward.end - self.plain.stretch(*place.forward).end,
            kept=self.plain.stretch(*place.backward).end - sum(piece.end for piece in runs_again),
            pieces=runs_again,
        )
