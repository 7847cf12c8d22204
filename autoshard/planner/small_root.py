"""A plan whose root owns little, where the request asks for that: ``root_percent``.

The fastest plan of a small model may leave most of it in the root: tied modules that run at both ends of the step gain
nothing from a unit of their own, and each unit costs the host some time. Such a plan shards little more than a single
unit does. Here the plan that was found, the first cut and finer ones are each extended by list units of the joint sets
and by the smallest atoms that hold much of what is left, until the root owns no more than was asked for, and the best
of them is the answer. The plan that was found bounds it from below.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from autoshard.analysis.ownership import application_order, owners
from autoshard.analysis.space import Analysis, LegalSpace
from autoshard.errors import Diagnostic
from autoshard.ir import ModelGraph
from autoshard.plan.schema import Decisions, Optimal
from autoshard.planner.candidate import Candidate, candidate, decide
from autoshard.planner.cut import finer_cuts, first_cut
from autoshard.planner.found import Found
from autoshard.request import Question
from autoshard.simulate import StepProfile, simulate

MAX_FINER_CUTS = 4
"""Finer cuts that are extended."""
Units = tuple[tuple[str, ...], ...]


def root_bytes(decisions: Decisions) -> int:
    """Bytes of the parameters that the root unit owns."""
    return next((unit.num_bytes for unit in decisions.units if unit.modules == ("",)), 0)


def with_small_root(
    found: Found,
    graph: ModelGraph,
    analysis: Analysis,
    question: Question,
    profile: StepProfile,
    is_legal: Callable[[Decisions], bool],
) -> tuple[Found, tuple[Diagnostic, ...]]:
    """The best plan with as little in the root as the request asks for; a note where no plan has so little.

    Args:
        found: the answer of the search.
        graph: the captured step.
        analysis: the facts about it.
        question: with the percentage and the allowance.
        profile: the step on one device.
        is_legal: no rule is broken by these decisions.
    """
    total = sum(param.nbytes for param in graph.params)
    most = total * question.root_percent // 100
    if root_bytes(found.decisions) <= most:
        return found, ()
    smaller: list[tuple[tuple[object, ...], Found]] = []
    for chosen in _candidates(found.decisions, graph, analysis, most):
        decisions = decide(graph, analysis.space, question, chosen)
        held = root_bytes(decisions)
        if held >= root_bytes(found.decisions) or not is_legal(decisions):
            continue
        timeline = simulate(graph, decisions, question, profile)
        if timeline.peak_bytes <= question.allowed_bytes:
            cost = (timeline.step_ns, timeline.peak_bytes)
            rank = (max(held, most), *(cost if question.objective == "time" else cost[::-1]), chosen.units)
            optimal = _bounded(found, timeline.step_ns)
            smaller.append((rank, replace(found, decisions=decisions, timeline=timeline, optimal=optimal)))
    best = min(smaller, key=lambda each: each[0])[1] if smaller else found
    best = replace(best, num_priced=found.num_priced + len(smaller))
    held = root_bytes(best.decisions)
    return best, () if held <= most else (_note(best, held, total, question.root_percent),)


def _candidates(known: Decisions, graph: ModelGraph, analysis: Analysis, most: int) -> Iterator[Candidate]:
    """Cuts extended until the root is small, with their list units kept and not, recomputing what the plan does."""
    units = tuple(unit.modules for unit in known.units if unit.modules != ("",))
    kept = {unit.modules for unit in known.units if not unit.reshard}
    first = first_cut(graph, analysis)
    cuts = (first, *islice(finer_cuts(graph, analysis, first), MAX_FINER_CUTS))
    shapes = (units, *(tuple((fqn,) for fqn in sorted(cut)) for cut in cuts))
    for shape in dict.fromkeys(shapes):
        extended = _extended(shape, graph, analysis.space, most)
        lists = [unit for unit in extended if len(unit) > 1]
        for chosen in dict.fromkeys((candidate(extended, kept), candidate(extended, {*kept, *lists}))):
            yield candidate(chosen.units, chosen.kept, known.recompute)
            if known.recompute:
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
