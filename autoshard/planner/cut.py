"""Where to cut: the first set of units, and finer ones.

The first cut takes each repeated block as a unit, the large modules outside the blocks (embedding, head) as units,
and leaves what is small to the root, which stays small. A finer cut replaces the largest unit, and all blocks
isomorphic to it, by the atoms below it.
"""

from collections.abc import Iterator

from autoshard.analysis.space import Analysis, Atom
from autoshard.ir import ModelGraph

SMALL_FRACTION = 256
"""A module outside the blocks stays with the root below this fraction (1/n) of all parameter bytes."""

Cut = frozenset[str]
"""FQNs of the atoms that are units of their own, the root left out."""


def first_cut(graph: ModelGraph, analysis: Analysis) -> Cut:
    """Each repeated block, each large module outside the blocks, and what the space requires.

    A block that is no atom itself is looked through: the atoms below it take its place. A module outside the blocks is
    looked through if blocks make up half of it, unless it is about as large as the blocks beside it.
    """
    atoms = {atom.module: atom for atom in analysis.space.atoms}
    in_block = {module for block in analysis.blocks for module in block.modules}
    nbytes = _bytes_below(graph, atoms)
    small = nbytes[""] // SMALL_FRACTION
    in_blocks = _bytes_in_blocks(atoms, in_block, nbytes)
    chosen: set[str] = set(analysis.space.required)

    def visit(fqn: str) -> None:
        children = atoms[fqn].children
        beside = max((nbytes[child] for child in children if child in in_block), default=0)
        for child in children:
            if child in in_block:
                if not _is_tiny_block(child, nbytes, small, atoms):
                    chosen.add(child)
            elif nbytes[child] > 2 * beside and 2 * in_blocks[child] >= nbytes[child]:
                visit(child)  # it holds blocks; one that is like the blocks beside it (a first block) does not
            elif nbytes[child] > small:
                chosen.add(child)

    visit("")
    return frozenset(chosen)


def finer_cuts(graph: ModelGraph, analysis: Analysis, cut: Cut) -> Iterator[Cut]:
    """Ever finer cuts: each replaces the largest unit that can be cut, and all isomorphic ones, by the atoms below.

    The residual of a cut unit goes to the unit above it, so a finer cut is not always a smaller peak.
    """
    atoms = {atom.module: atom for atom in analysis.space.atoms}
    nbytes = _bytes_below(graph, atoms)
    required = frozenset(analysis.space.required)
    split: set[str] = set()
    while divisible := [fqn for fqn in sorted(cut - split) if atoms[fqn].children]:
        largest = max(divisible, key=lambda fqn: nbytes[fqn])
        alike = {fqn for fqn in divisible if _isomorphic(atoms[fqn], atoms[largest])}
        split |= alike
        cut = (cut - (alike - required)) | {child for fqn in alike for child in atoms[fqn].children}
        yield cut


def tail_groups(graph: ModelGraph, analysis: Analysis, cut: Cut) -> tuple[tuple[str, ...], ...]:
    """The units of a cut with the last one extended by the small modules that run just before it (norm and head).

    Empty if there is nothing to group.
    """
    space, atoms = analysis.space, {atom.module: atom for atom in analysis.space.atoms}
    called = [atom for atom in space.atoms if atom.module in cut and atom.num_calls]
    if not called:
        return ()
    last = max(called, key=lambda atom: atom.order).module
    group = [last]
    while first := next(
        (first for first, second in space.groupable if second == group[0] and _is_left_to_root(first, cut, atoms)),
        "",
    ):
        group.insert(0, first)
    if len(group) == 1:
        return ()
    return (*((fqn,) for fqn in sorted(cut) if fqn != last), tuple(group))


def _is_left_to_root(fqn: str, cut: Cut, atoms: dict[str, Atom]) -> bool:
    """Neither the atom nor one above or below it is a unit."""
    above = fqn
    while above:
        if above in cut:
            return False
        above = atoms[above].parent
    return not _has_unit_below(fqn, cut, atoms)


def _has_unit_below(fqn: str, cut: Cut, atoms: dict[str, Atom]) -> bool:
    return any(child in cut or _has_unit_below(child, cut, atoms) for child in atoms[fqn].children)


def _isomorphic(atom: Atom, other: Atom) -> bool:
    return atom.module == other.module or (bool(atom.repeat_class) and atom.repeat_class == other.repeat_class)


def _is_tiny_block(fqn: str, nbytes: dict[str, int], small: int, atoms: dict[str, Atom]) -> bool:
    """Blocks that together are small are no units: a run of 1000 tiny norms is not worth 1000 collectives."""
    alike = [other for other in atoms.values() if other.repeat_class == atoms[fqn].repeat_class]
    return sum(nbytes[other.module] for other in alike) <= small


def _bytes_in_blocks(atoms: dict[str, Atom], in_block: set[str], nbytes: dict[str, int]) -> dict[str, int]:
    """Bytes of the outermost blocks below each atom."""
    found: dict[str, int] = {}
    for atom in atoms.values():  # post-order: children first
        found[atom.module] = sum(nbytes[child] if child in in_block else found[child] for child in atom.children)
    return found


def _bytes_below(graph: ModelGraph, atoms: dict[str, Atom]) -> dict[str, int]:
    sizes = {param.key: param.nbytes for param in graph.params}
    return {fqn: sum(sizes[key] for key in atom.params) for fqn, atom in atoms.items()}
