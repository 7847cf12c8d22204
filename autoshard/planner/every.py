"""Every plan of a small space, for models with few modules: nested units, lists, ties, whatever is legal.

Each set of atoms and lists that the space allows, each reshard, each recompute, the root's reshard. Where there are at
most so many plans that all can be priced by the fold, the best of them is the best there is, and nothing has to be a
chain.
"""

from collections.abc import Iterator
from itertools import product

from autoshard.analysis.ownership import application_order
from autoshard.analysis.space import LegalSpace
from autoshard.ir import ModelGraph
from autoshard.planner.candidate import Candidate, candidate
from autoshard.request import Question

MAX_PLANS = 500
"""Plans that are priced one by one."""
MAX_UNITS = 12
"""Units to choose among; more of them are too many sets."""
LONGEST = 4
"""Members of a list."""
SPACE = "every legal plan: nested units, lists of up to 4 neighbours, joint sets, reshard, recompute, the root"

Unit = tuple[str, ...]


def every_plan(graph: ModelGraph, space: LegalSpace, question: Question) -> tuple[Candidate, ...] | None:
    """All plans, ``None`` if there are too many."""
    units = _units(space)
    if graph.frontend == "tree" or len(units) > MAX_UNITS:
        return None
    found: dict[Candidate, None] = {}
    for chosen in _sets(space, units, ()):
        try:
            application_order(graph, (*chosen, ("",)))
        except ValueError:  # two lists that contain members of each other
            continue
        for plan in _decided(space, question, chosen):
            found[plan] = None
            if len(found) > MAX_PLANS:
                return None
    return tuple(found)


def _units(space: LegalSpace) -> list[Unit]:
    """Atoms, runs of neighbours, and sets that go together."""
    units: list[Unit] = [(atom.module,) for atom in space.atoms if atom.module]
    lists: list[Unit] = list(space.groupable)
    while lists and len(lists[0]) <= LONGEST and len(units) <= MAX_UNITS:
        units += lists
        lists = [(*unit, after) for unit in lists for before, after in space.groupable if before == unit[-1]]
    return list(dict.fromkeys([*units, *space.joint]))


def _sets(space: LegalSpace, rest: list[Unit], taken: tuple[Unit, ...]) -> Iterator[tuple[Unit, ...]]:
    """Sets of units in which no module stands twice and all that is required does."""
    if not rest:
        if all(any(fqn in unit for unit in taken) for fqn in space.required):
            yield taken
        return
    yield from _sets(space, rest[1:], taken)
    if not any(set(rest[0]) & set(unit) for unit in taken):
        yield from _sets(space, rest[1:], (*taken, rest[0]))


def _decided(space: LegalSpace, question: Question, chosen: tuple[Unit, ...]) -> Iterator[Candidate]:
    """A set of units with each reshard and each recompute that the request leaves open."""
    parents = {atom.module: atom.parent for atom in space.atoms}
    around: set[str] = set()
    for module in (module for unit in chosen for module in unit):
        while module and (module := parents.get(module, "")):
            around.add(module)
    may = [fqn for fqn in space.recomputable if fqn not in around]
    masks: Iterator[tuple[bool, ...]] = iter([(question.recompute == "full",) * len(may)])
    if question.recompute == "auto":
        masks = product((False, True), repeat=len(may))
    flags = (True, False) if question.reshard == "auto" else (question.reshard == "always",)
    root = (False, True) if question.reshard == "auto" and not space.root_must_keep else (False,)
    for mask in masks:
        recompute = tuple(fqn for fqn, again in zip(may, mask, strict=True) if again)
        for reshard in product(flags, repeat=len(chosen)):
            kept = [unit for unit, each in zip(chosen, reshard, strict=True) if not each]
            for reshards_root in root:
                yield candidate(chosen, kept, recompute, reshards_root)
