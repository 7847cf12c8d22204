"""The chain: the modules of a model in the order in which they run, where units may begin and end.

A model is a chain where its modules run one after the other and backward passes them in the reverse order. The chain is
made of *places*: a place is a module that may be a unit, or a part of one together with its neighbours. The outermost
places are found by looking through the containers; below one stand the places inside it, if units of these can own all
that it holds. Every border between places is a *border*, numbered along the chain; a place reaches from one to another.

What is no chain (parallel branches, modules called twice, parameters that several places share) has ``None`` here, and
the search goes another way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.analysis.space import Analysis, Atom, LegalSpace
from autoshard.simulate import StepProfile

SMALL_FRACTION = 64
"""A place is small below this fraction (1/n) of the bytes of the largest one beside it."""
MAX_SMALL_CHAIN = 5
"""In a chain of at most so many places none is small."""
MAX_DEFERRED = 3
"""Most places at the head of the chain whose gradients stay to the end of backward, since no input of theirs trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A module of the chain.

    Attributes:
        module: FQN.
        first: border at which it begins.
        stop: border at which it ends.
        forward: positions of its forward ops: first and past-the-end.
        backward: positions of its backward ops.
        keys: parameters that it holds.
        recomputes: it may compute its activations again.
        defers: no input of it needs a gradient, so that FSDP2 reduces its gradients at the end of backward.
        is_small: it is never a unit by itself.
        parts: the places inside it, empty if it is not cut.
    """

    module: str
    first: int
    stop: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    keys: tuple[str, ...]
    recomputes: bool
    defers: bool
    is_small: bool = False
    parts: tuple["Place", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Places in execution order, and where the sweep stands between them.

    Attributes:
        places: the outermost ones.
        entered: by border: position in forward at which the sweep stands there.
        left: by border: position in backward at which it stands there.
        num_deferred: places at the head whose gradients stay to the end of backward.
        idle: modules that never run, each a unit of its own.
    """

    places: tuple[Place, ...]
    entered: tuple[int, ...]
    left: tuple[int, ...]
    num_deferred: int
    idle: tuple[str, ...]

    @property
    def num_borders(self) -> int:
        """Borders, both ends counted."""
        return len(self.entered)


def spine(analysis: Analysis, nbytes: dict[str, int]) -> tuple[Atom, ...]:
    """The outermost atoms that are blocks or stand beside them, in execution order, those that never run left out.

    A container is looked through if it holds more than half of what it stands in or blocks make up half of it.
    """
    atoms = {atom.module: atom for atom in analysis.space.atoms}
    in_block = {module for block in analysis.blocks for module in block.modules}
    in_blocks: dict[str, int] = {}
    for atom in atoms.values():  # children first
        in_blocks[atom.module] = sum(
            nbytes[child] if child in in_block else in_blocks[child] for child in atom.children
        )
    found: list[Atom] = []

    def visit(fqn: str) -> None:
        children = atoms[fqn].children
        beside = max((nbytes[child] for child in children if child in in_block), default=0)
        for child in children:
            holds_blocks = nbytes[child] > 2 * beside and 2 * in_blocks[child] >= nbytes[child]
            if child not in in_block and holds_blocks and atoms[child].children:
                visit(child)
            elif atoms[child].num_calls:
                found.append(atoms[child])

    visit("")
    return tuple(sorted(found, key=lambda atom: atom.order))


def find_chain(
    analysis: Analysis,
    profile: StepProfile,
    outermost: Sequence[Atom],
    depth: int,
    recomputes: frozenset[str],
    pre_order: Sequence[str],
    nbytes: dict[str, int],
) -> Chain | None:
    """The chain of these atoms; what the root holds is left out of them. ``None`` if they are no chain.

    Args:
        analysis: facts about the model.
        profile: of the step in which nothing recomputes.
        outermost: atoms in execution order.
        depth: levels of places below the outermost ones.
        recomputes: modules that may compute their activations again.
        pre_order: all modules as FSDP2 lists them.
        nbytes: bytes of the parameters of each atom.
    """
    space = analysis.space
    root = profile.runs.get("", ())
    if space.required or space.replicated or len(root) != 1 or not outermost:
        return None
    run = root[0]
    if run.backward is None or not run.output_needs_grad:
        return None
    if run.inputs_need_grad and run.backward[1] != profile.num_ops:
        return None
    atoms = {atom.module: atom for atom in space.atoms}
    moments = {moment.key: (moment.born, moment.complete) for moment in profile.gradients}
    idle = tuple(
        atom.module for atom in space.atoms if atom.module and not atom.num_calls and atoms[atom.parent].num_calls
    )
    idle_keys = frozenset(key for fqn in idle for key in atoms[fqn].params)
    is_long = len(outermost) > MAX_SMALL_CHAIN
    reader = _Reader(space, atoms, profile, moments, recomputes, idle_keys, nbytes, is_long)
    places: list[Place] = []
    for atom in outermost:
        place = reader.place(atom, places[-1].stop if places else 0, depth)
        if place is None or (places and not _follows(places[-1], place)):
            return None
        places.append(place)
    num_deferred = sum(place.defers for place in places)
    if num_deferred > MAX_DEFERRED or any(place.defers for place in places[num_deferred:]):
        return None
    deferred = {place.module for place in places[:num_deferred]}
    rank = {fqn: index for index, fqn in enumerate(pre_order)}
    ranks = [rank[place.module] for place in places]
    if num_deferred and ranks[:num_deferred] != sorted(ranks)[:num_deferred]:
        return None
    places = [replace(place, parts=()) if place.module in deferred else place for place in places]
    if is_long:
        places = list(marked_small(places, nbytes))
    aligned = _aligned(_renumbered(places), profile)
    if aligned is None:
        return None
    chained, entered, left = aligned
    return Chain(places=chained, entered=entered, left=left, num_deferred=num_deferred, idle=idle)


def pieces(siblings: Sequence[Place], space: LegalSpace) -> tuple[tuple[Place, ...], ...]:
    """Neighbours that are never parted: small places go with what follows them."""
    pairs = frozenset(space.groupable)
    found: list[list[Place]] = []
    joins = False
    for place in siblings:
        if found and joins and (found[-1][-1].module, place.module) in pairs:
            found[-1].append(place)
        else:
            found.append([place])
        joins = place.is_small
    return tuple(tuple(each) for each in found)


def groups(siblings: Sequence[Place], space: LegalSpace, longest: int) -> Iterator[tuple[Place, ...]]:
    """Runs of neighbours that may share a unit, single ones first; a run covers all that lies between its borders."""
    pairs = frozenset(space.groupable)
    found = pieces(siblings, space)
    for first in range(len(found)):
        members: tuple[Place, ...] = ()
        for piece in found[first : first + longest]:
            if members and (members[-1].module, piece[0].module) not in pairs:
                break
            members += piece
            yield members


def every_place(places: Sequence[Place]) -> Iterator[Place]:
    """All places, each before its parts."""
    for place in places:
        yield place
        yield from every_place(place.parts)


@dataclass(frozen=True, slots=True)
class _Reader:
    space: LegalSpace
    atoms: dict[str, Atom]
    profile: StepProfile
    moments: dict[str, tuple[int, int]]
    recomputes: frozenset[str]
    idle_keys: frozenset[str]
    nbytes: dict[str, int]
    is_long: bool

    def place(self, atom: Atom, first: int, depth: int) -> Place | None:
        """The place of an atom; ``None`` if FSDP2's hooks do not run around it in the plain order."""
        runs = self.profile.runs.get(atom.module, ())
        if atom.num_calls != 1 or len(runs) != 1 or not atom.params:
            return None
        run = runs[0]
        if run.backward is None or not run.output_needs_grad or run.forward[0] >= run.forward[1]:
            return None
        moments = [self.moments[key] for key in atom.params if key in self.moments]
        if any(born < run.backward[0] or complete >= run.backward[1] for born, complete in moments):
            return None
        parts = self._parts(atom, first, depth) if depth else ()
        return Place(
            module=atom.module,
            first=first,
            stop=parts[-1].stop if parts else first + 1,
            forward=run.forward,
            backward=run.backward,
            keys=tuple(key for key in atom.params if key not in self.idle_keys),
            recomputes=atom.module in self.recomputes,
            defers=not run.inputs_need_grad,
            parts=parts,
        )

    def _parts(self, atom: Atom, first: int, depth: int) -> tuple[Place, ...]:
        """The places inside an atom, if together they hold all that it does and form a chain."""
        children = [child for child in atom.children if self.atoms[child].num_calls]
        if atom.residual or not children:
            return ()
        if len(children) == 1:
            return self._parts(self.atoms[children[0]], first, depth)
        parts: list[Place] = []
        for child in children:
            place = self.place(self.atoms[child], parts[-1].stop if parts else first, depth - 1)
            if place is None or place.defers or (parts and not _follows(parts[-1], place)):
                return ()
            parts.append(place)
        return marked_small(parts, self.nbytes) if self.is_long else tuple(parts)


def marked_small(places: Sequence[Place], nbytes: dict[str, int]) -> tuple[Place, ...]:
    """The places, those marked that are small beside the largest."""
    largest = max(nbytes[place.module] for place in places)
    return tuple(
        replace(place, is_small=SMALL_FRACTION * nbytes[place.module] < largest, parts=place.parts) for place in places
    )


def _follows(before: Place, after: Place) -> bool:
    return before.forward[1] <= after.forward[0] and after.backward[1] <= before.backward[0]


def _renumbered(places: Sequence[Place], first: int = 0) -> tuple[Place, ...]:
    """The places with borders counted anew, after some lost their parts."""
    found: list[Place] = []
    for place in places:
        start = found[-1].stop if found else first
        parts = _renumbered(place.parts, start)
        found.append(replace(place, first=start, stop=parts[-1].stop if parts else start + 1, parts=parts))
    return tuple(found)


def _aligned(
    places: tuple[Place, ...], profile: StepProfile
) -> tuple[tuple[Place, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Positions of the borders, the places that leave no choice about them; others lose their parts.

    Ops between places belong to one side of a border. Hooks cut the work of the device there and nowhere else, so each
    border has to be a position at which all units that end there end, or all that begin there begin.
    """
    while True:
        num_borders = places[-1].stop + 1
        root = profile.runs[""][0]
        assert root.backward is not None
        ends: list[list[Place]] = [[] for _ in range(num_borders)]
        begins: list[list[Place]] = [[] for _ in range(num_borders)]
        for place in every_place(places):
            ends[place.stop].append(place)
            begins[place.first].append(place)
        entered, left = [], []
        bad = -1
        for border in range(num_borders):
            forward = _common(
                [place.forward[0] for place in begins[border]] or [root.forward[1]],
                [place.forward[1] for place in ends[border]] or [root.forward[0]],
            )
            backward = _common(
                [place.backward[0] for place in ends[border]] or [profile.num_ops],
                [place.backward[1] for place in begins[border]] or [root.backward[0]],
            )
            if border == num_borders - 1 and len({place.backward[0] for place in ends[border]}) > 1:
                backward = None  # the last unit may have to gather itself, where its own hook runs
            if border == 0:
                forward, backward = root.forward[0], profile.num_ops
            if forward is None or backward is None:
                bad = border
                break
            entered.append(forward)
            left.append(backward)
        if bad < 0:
            return places, tuple(entered), tuple(left)
        cut = {place.module for place in places if place.parts and place.first <= bad <= place.stop}
        if not cut:
            return None
        places = _renumbered([replace(place, parts=()) if place.module in cut else place for place in places])


def _common(preferred: list[int], other: list[int]) -> int | None:
    """The one position of a side on which all agree."""
    for side in (preferred, other):
        if len(set(side)) == 1:
            return side[0]
    return None
