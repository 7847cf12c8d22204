"""A plan whose root owns little, where the request asks for that (``root_percent``) or the model is very small.

The fastest plan of a small model may leave most of it in the root: tied modules that run at both ends of the step gain
nothing from a unit of their own, and each unit costs the host some time. Such a plan shards little more than a single
unit does. Here the plan that was found, the first cut and finer ones are each extended by list units of the joint sets
and by the smallest atoms that hold much of what is left, until the root owns no more than was asked for, and the best
of them, or of the baselines with so small a root, is the answer. The plan that was found bounds it from below.

Of a model of a few kilobytes the fastest plan is nearly always the root alone, since all that it waits for is the host.
Such a model stands for a larger one (a test, a first try), so that it is planned with small units, the root among them,
unless the request says how large the root may be.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from autoshard.analysis.ownership import application_order, owners
from autoshard.analysis.repeats import outermost
from autoshard.analysis.space import Analysis, Atom, LegalSpace
from autoshard.errors import Diagnostic
from autoshard.ir import ModelGraph
from autoshard.plan.schema import Decisions, Optimal
from autoshard.planner.baselines import Baseline
from autoshard.planner.candidate import Candidate, candidate, decide
from autoshard.planner.cut import finer_cuts, first_cut
from autoshard.planner.found import Found
from autoshard.request import Question
from autoshard.simulate import StepProfile, simulate
from autoshard.sizes import format_bytes, format_ns

SMALL_MODEL_BYTES = 4 * 2**20
"""A model with at most so many bytes of parameters is planned with small units if nothing is asked for."""
SMALL_UNIT_PERCENT = 25
MAX_FINER_CUTS = 4
"""Finer cuts that are extended."""
Units = tuple[tuple[str, ...], ...]


def root_bytes(decisions: Decisions) -> int:
    """Bytes of the parameters that the root unit owns."""
    return next((unit.num_bytes for unit in decisions.units if unit.modules == ("",)), 0)


def largest_bytes(decisions: Decisions) -> int:
    """Bytes of the parameters of the unit that owns most."""
    return max(unit.num_bytes for unit in decisions.units)


def with_small_root(
    found: Found,
    graph: ModelGraph,
    analysis: Analysis,
    question: Question,
    profile: StepProfile,
    is_legal: Callable[[Decisions], bool],
    legal_baselines: Sequence[Baseline] = (),
) -> tuple[Found, tuple[Diagnostic, ...]]:
    """The best plan with as little in the root as is wanted, and a note: no plan has so little, or nobody asked for it.

    Args:
        found: the answer of the search.
        graph: the captured step.
        analysis: the facts about it.
        question: with the percentage and the allowance.
        profile: the step on one device.
        is_legal: no rule is broken by these decisions.
        legal_baselines: plans that count too.
    """
    total = sum(param.nbytes for param in graph.params)
    percent = question.root_percent
    if percent is not None:
        most, measured = total * percent // 100, root_bytes
    elif total <= SMALL_MODEL_BYTES and graph.frontend == "trace":
        most, measured = _small_unit(graph, analysis, total), largest_bytes
    else:
        return found, ()
    if measured(found.decisions) <= most:
        return found, ()
    smaller: list[tuple[tuple[object, ...], Found]] = []
    known = (base.candidate for base in legal_baselines)
    for chosen in dict.fromkeys((*known, *_candidates(found.decisions, graph, analysis, most, question.recompute))):
        decisions = decide(graph, analysis.space, question, chosen)
        held = measured(decisions)
        if held >= measured(found.decisions) or not is_legal(decisions):
            continue
        timeline = found.priced.get(chosen) or simulate(graph, decisions, question, profile)
        if timeline.peak_bytes <= question.allowed_bytes:
            cost = (timeline.step_ns, timeline.peak_bytes)
            rank = (max(held, most), *(cost if question.objective == "time" else cost[::-1]), chosen.units)
            optimal = _bounded(found, timeline.step_ns)
            smaller.append((rank, replace(found, decisions=decisions, timeline=timeline, optimal=optimal)))
    best = min(smaller, key=lambda each: each[0])[1] if smaller else found
    best = replace(best, num_priced=found.num_priced + len(smaller))
    if question.root_percent is None:
        return best, () if best.decisions == found.decisions else (_unasked(best, found, total),)
    held = root_bytes(best.decisions)
    return best, () if held <= most else (_note(best, held, total, question.root_percent),)


def _blocks(graph: ModelGraph, analysis: Analysis) -> dict[str, Atom]:
    """The outermost repeated modules that may be units."""
    atoms = {atom.module: atom for atom in analysis.space.atoms}
    repeated = {fqn for block in analysis.blocks for fqn in block.modules if fqn in atoms}
    return {fqn: atoms[fqn] for fqn in outermost(graph, repeated)}


def _small_unit(graph: ModelGraph, analysis: Analysis, total: int) -> int:
    """Bytes that a unit of a small model may own: blocks stay whole."""
    sizes = {param.key: param.nbytes for param in graph.params}
    blocks = (sum(sizes[key] for key in atom.params) for atom in _blocks(graph, analysis).values())
    return max((total * SMALL_UNIT_PERCENT // 100, *blocks))


def _candidates(
    known: Decisions, graph: ModelGraph, analysis: Analysis, most: int, recompute: str
) -> Iterator[Candidate]:
    """Cuts extended until the root is small, with their list units kept and not, recomputing what the plan does."""
    units = tuple(unit.modules for unit in known.units if unit.modules != ("",))
    kept = {unit.modules for unit in known.units if not unit.reshard}
    first = first_cut(graph, analysis)
    cuts = (first, *islice(finer_cuts(graph, analysis, first), MAX_FINER_CUTS))
    shapes = (units, *(tuple((fqn,) for fqn in sorted(cut)) for cut in (*cuts, frozenset(_blocks(graph, analysis)))))
    for shape in dict.fromkeys(shapes):
        extended = _extended(shape, graph, analysis.space, most)
        lists = [unit for unit in extended if len(unit) > 1]
        for chosen in dict.fromkeys((candidate(extended, kept), candidate(extended, {*kept, *lists}))):
            yield candidate(chosen.units, chosen.kept, known.recompute)
            if known.recompute and recompute != "full":
                yield chosen


def _extended(units: Units, graph: ModelGraph, space: LegalSpace, most: int) -> Units:
    """The units with joint sets, then with single atoms, each taking the most from the root that is left to take."""
    while sum((left := _root_params(graph, space, units)).values()) > most:
        joined = [_joined(units, joint) for joint in space.joint if joint not in units]
        taken = {new: _taken(graph, space, left, new) for new in joined}
        if not any(taken.values()):
            innermost = {next((atom.module for atom in space.atoms if key in atom.params), "") for key in left}
            singles = [(*units, (fqn,)) for fqn in sorted(innermost) if fqn and (fqn,) not in units]
            taken = {new: _taken(graph, space, left, new) for new in singles}
        best = max(taken, key=lambda new: (taken[new], new), default=units)
        if not taken.get(best):
            break
        units = best
    return units


def _taken(graph: ModelGraph, space: LegalSpace, left: dict[str, int], units: Units) -> int:
    """Bytes that the root owns no more with these units; 0 if they cannot be applied in any order."""
    try:
        return max(sum(left.values()) - sum(_root_params(graph, space, units).values()), 0)
    except ValueError:
        return 0


def _joined(units: Units, joint: tuple[str, ...]) -> Units:
    """The units with a joint set in place of those that its modules are part of."""
    return (*(unit for unit in units if not set(unit) & set(joint)), joint)


def _root_params(graph: ModelGraph, space: LegalSpace, units: Units) -> dict[str, int]:
    """Bytes of the parameters that the root owns beside these units, by key; ``ValueError`` if no order is right."""
    order = application_order(graph, (*units, ("",)))
    owned = dict(zip(order, owners(graph, order, space.replicated), strict=True))
    sizes = {param.key: param.nbytes for param in graph.params}
    return {key: sizes[key] for key in sorted(owned[("",)])}


def _bounded(found: Found, step_ns: int) -> Optimal:
    """What is known: no plan is faster than the best one without the demand, if that was proved, or than its bound."""
    bound = found.optimal.bound_ns
    gap = round(step_ns / bound - 1, 6) if bound else -1.0
    space = f"{found.optimal.space}; extended to a small root"
    return Optimal(status="bounded" if bound else "heuristic", bound_ns=bound, gap=gap, space=space)


def _unasked(best: Found, fastest: Found, total: int) -> Diagnostic:
    times = [format_ns(found.timeline.step_ns) for found in (best, fastest)]
    return Diagnostic(
        code="AS304",
        severity="note",
        where="(root)",
        message=f"the model has {format_bytes(total)} of parameters: it is planned in small units, as a larger one of "
        f"its kind would be, at a projected {times[0]} instead of {times[1]}",
        remedy="ask for --root-percent 100 for the plan that is fastest under the cost model",
    )


def _note(found: Found, held: int, total: int, percent: int) -> Diagnostic:
    root = next(unit for unit in found.decisions.units if unit.modules == ("",))
    return Diagnostic(
        code="AS303",
        severity="note",
        where="(root)",
        message=f"the root owns {held / total:.0%} of the parameter bytes ({root.num_params} parameters), more than "
        f"the {percent}% that were asked for: no legal plan that fits leaves it less",
        remedy="`autoshard plan --dump space` shows which modules may be units; a larger --memory may allow more",
    )
