"""Candidates made by rule: one unit a block, the tail grouped, ever finer cuts, as much kept unsharded as fits.

For models that are no chain, where the sweep has nothing to walk along. Where nothing fits without it, the first blocks
recompute their activations, as few as will do. Every candidate is priced by the fold. The rules look at a part of what
is legal, so what they find has a bound and a gap, and is never called proved.
"""

from collections.abc import Iterable, Iterator, Sequence

from autoshard.analysis.space import Analysis
from autoshard.ir import ModelGraph
from autoshard.planner.candidate import Candidate, candidate
from autoshard.planner.cut import finer_cuts, first_cut, tail_groups
from autoshard.planner.found import Prices

MAX_FINER_CUTS = 32
"""Finer cuts tried before an allowance is called infeasible; a count, so that the answer is the same everywhere."""
SPACE = (
    "one unit a block, large modules as units, finer cuts, the tail grouped, reshard per unit, first blocks recompute"
)


def by_rules(graph: ModelGraph, analysis: Analysis, prices: Prices) -> list[Candidate]:
    """Candidates made by rule that fit; empty if none of them does."""
    question = prices.question
    fitting: list[Candidate] = []
    for cut in _cuts(graph, analysis):
        shapes = list(_variants(graph, analysis, cut))
        if question.recompute != "full":
            fitting += [chosen for chosen in shapes if prices.fits(chosen)]
        if question.recompute == "full" or (question.recompute == "auto" and not fitting):
            fitting += _with_recompute(analysis, shapes, prices)
        if fitting and question.objective == "time":
            break
    for chosen in sorted(fitting, key=prices.rank)[:4]:
        if question.reshard == "auto":
            fitting += _with_more_kept(analysis, chosen, prices)
    return fitting


def _cuts(graph: ModelGraph, analysis: Analysis) -> Iterator[frozenset[str]]:
    cut = first_cut(graph, analysis)
    yield cut
    for count, finer in enumerate(finer_cuts(graph, analysis, cut)):
        if count == MAX_FINER_CUTS:
            return
        yield finer


def _variants(graph: ModelGraph, analysis: Analysis, cut: frozenset[str]) -> Iterator[Candidate]:
    """A cut as it is, with its tail grouped, and both with the joint sets as list units."""
    single: tuple[tuple[str, ...], ...] = tuple((fqn,) for fqn in sorted(cut))
    shapes = [single]
    if tail := tail_groups(graph, analysis, cut):
        shapes.append(tail)
    for joint in analysis.space.joint:
        members = set(joint)
        shapes += [(*(unit for unit in shape if not members & set(unit)), joint) for shape in shapes[:2]]
    for shape in dict.fromkeys(shapes):
        yield candidate(shape)
        yield candidate(shape, kept=_last(analysis, shape, 1))


def _in_execution_order(analysis: Analysis, units: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    atoms = {atom.module: atom for atom in analysis.space.atoms}
    rank = {fqn: place for place, fqn in enumerate(analysis.order)}
    return sorted(units, key=lambda unit: (atoms[unit[-1]].order if unit[-1] in atoms else rank.get(unit[-1], 0), unit))


def _last(analysis: Analysis, units: Iterable[tuple[str, ...]], count: int) -> list[tuple[str, ...]]:
    return _in_execution_order(analysis, units)[-count:] if count else []


def _with_recompute(analysis: Analysis, shapes: Sequence[Candidate], prices: Prices) -> list[Candidate]:
    """The candidates with as few of the first blocks recomputing as fit; with all of them if the request says so.

    The activations of the first blocks live longest, and each block more that recomputes lowers the peak or leaves it,
    so the fewest are found by bisection. A block with a unit inside does not recompute: its units would all be gathered
    for the second run and stay.
    """
    found = []
    for chosen in shapes:
        blocks = _blocks_without_units(analysis, chosen)
        every = candidate(chosen.units, chosen.kept, blocks)
        if not blocks:
            if prices.question.recompute == "full" and prices.fits(chosen):
                found.append(chosen)  # all that may recompute does: nothing, as the plan's first line says
            continue
        if not prices.fits(every):
            continue
        low, high = (len(blocks), len(blocks)) if prices.question.recompute == "full" else (1, len(blocks))
        while low < high:
            middle = (low + high) // 2
            fewer = candidate(chosen.units, chosen.kept, blocks[:middle])
            low, high = (low, middle) if prices.fits(fewer) else (middle + 1, high)
        fewest = candidate(chosen.units, chosen.kept, blocks[:low])
        found.append(fewest if prices.fits(fewest) else every)
    return found


def _blocks_without_units(analysis: Analysis, chosen: Candidate) -> tuple[str, ...]:
    """The blocks that may recompute, have no unit strictly inside, and are not a part of a unit."""
    parents = {atom.module: atom.parent for atom in analysis.space.atoms}
    modules = {module for unit in chosen.units for module in unit}
    around_units = set().union(*(_above(parents, module) for module in modules))
    return tuple(
        fqn
        for fqn in analysis.space.recomputable
        if fqn not in around_units and modules.isdisjoint(_above(parents, fqn))
    )


def _above(parents: dict[str, str], fqn: str) -> set[str]:
    found: set[str] = set()
    while fqn and (fqn := parents.get(fqn, "")):
        found.add(fqn)
    return found


def _with_more_kept(analysis: Analysis, chosen: Candidate, prices: Prices) -> list[Candidate]:
    """The candidate with its last k units kept, for the largest k that fits and half of it.

    The peak grows with k, so the largest is found by bisection; the last units in forward are the first in backward,
    so keeping them holds their bytes for the shortest time.
    """
    low, high = 0, len(chosen.units)
    while low < high:
        middle = (low + high + 1) // 2
        more = candidate(chosen.units, _last(analysis, chosen.units, middle), chosen.recompute)
        low, high = (middle, high) if prices.fits(more) else (low, middle - 1)
    counts = sorted({low, low // 2, min(1, low)})
    tried = [candidate(chosen.units, _last(analysis, chosen.units, count), chosen.recompute) for count in counts]
    return [more for more in tried if prices.fits(more)]
