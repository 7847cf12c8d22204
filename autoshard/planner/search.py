"""The search: the exact sweep along the chain, beside what people use today, all priced by the same fold.

Where a model has so few plans that all can be priced, they are. Else the sweep proves its answer where nothing was left
out but what cannot be better. The plan that it returns is priced again by ``simulate``; where the sweep counted less
memory its time is a bound all the same; where the two differ otherwise, or the model is no chain, candidates made by
rule take part, and the answer states a bound and a gap. Every legal baseline that fits is a candidate, so the plan is
never worse than any.
"""

from collections.abc import Sequence

from autoshard.analysis.space import Analysis
from autoshard.errors import InfeasibleBudgetError, NoLegalUnitError
from autoshard.ir import ModelGraph
from autoshard.plan.schema import Optimal
from autoshard.planner.along import STAGES, ChainAnswer, ChainSearch
from autoshard.planner.baselines import Baseline
from autoshard.planner.bound import lower_bound_ns
from autoshard.planner.candidate import Candidate
from autoshard.planner.every import SPACE as EVERY
from autoshard.planner.every import every_plan
from autoshard.planner.found import Found, Prices
from autoshard.planner.remedies import remedies
from autoshard.planner.rules import by_rules
from autoshard.request import Question
from autoshard.simulate import StepProfile, Timeline

CHAIN = (
    f"units of up to {STAGES[-1]} neighbours, none nested, small modules with their follower, blocks behind the "
    "first cut into their parts, reshard per unit, recompute per block, what the root holds; and the baselines"
)
CHAIN_IN_PART = f"{CHAIN}; modules that run beside others in the root, or by rule"
CHAIN_AND_RULES = f"{CHAIN}; finer cuts by rule, since nothing else fits"
RULES = (
    "no chain: one unit a block, large modules as units, finer cuts, the tail grouped, reshard per unit, first blocks "
    "recompute; and the baselines"
)


def search(
    graph: ModelGraph,
    analysis: Analysis,
    question: Question,
    profile: StepProfile,
    legal_baselines: Sequence[Baseline],
) -> Found:
    """The best plan that fits: the fastest, or for the objective ``memory`` the one with the lowest peak.

    Raises:
        NoLegalUnitError: the space forbids every plan.
        InfeasibleBudgetError: no plan fits the allowance, or none was found that does.
    """
    refused = tuple(d for d in analysis.space.diagnostics if d.severity == "error")
    if refused:
        raise NoLegalUnitError(refused)
    prices = Prices(graph, analysis, question, profile)
    known = list(dict.fromkeys(base.candidate for base in legal_baselines))
    fitting = [chosen for chosen in known if prices.fits(chosen)]
    every = every_plan(graph, analysis.space, question)
    chain = answer = None
    if every is not None:
        fitting += [chosen for chosen in every if prices.fits(chosen)]
        space, is_exact = EVERY, True
    else:
        chain = ChainSearch(graph, analysis, question, profile)
        best_ns = min((prices(chosen).step_ns for chosen in fitting), default=None)
        answer = _along(chain, question, best_ns)
        is_whole, is_exact = chain.is_whole, chain.is_exact and answer is not None
        space = CHAIN if is_whole else CHAIN_IN_PART
        if answer is not None and answer.candidate is not None:
            # Where the world counts too little memory its best time still bounds all; too much of either never may be.
            timeline = prices(answer.candidate)
            excess = timeline.peak_bytes - answer.peak_bytes
            is_exact &= timeline.step_ns == answer.step_ns and excess >= 0
            if not prices.fits(answer.candidate) and question.objective == "time":
                less = chain.fastest(question.allowed_bytes - excess, best_ns)
                fitting += [less.candidate] if less.candidate is not None and prices.fits(less.candidate) else []
            elif prices.fits(answer.candidate):
                fitting.append(answer.candidate)
        if not (is_exact and is_whole and fitting) or question.objective == "memory":
            # Finer cuts than the chain's take longer and need less: where nothing else fits they are the answer.
            if not is_exact or not fitting:
                space, is_exact = (CHAIN_AND_RULES if is_exact else RULES), False
            ruled = by_rules(graph, analysis, prices)
            # Without ops no time is known, and what has the fewest collectives would always be the best.
            fitting = ruled or fitting if graph.frontend == "tree" else fitting + ruled
    if not fitting:
        raise _infeasible(graph, analysis, question, chain, prices)
    best = min(fitting, key=prices.rank)
    decisions, timeline = prices.known[best]
    proved_ns = 0
    if is_exact:
        proved_ns = timeline.step_ns if answer is None else min(answer.bound_ns, timeline.step_ns)
    return Found(
        decisions=decisions,
        timeline=timeline,
        optimal=_optimal(timeline, max(proved_ns, lower_bound_ns(timeline, profile, question)), space),
        num_priced=len(prices.known),
        priced={chosen: timeline for chosen, (_, timeline) in prices.known.items()},
    )


def _along(chain: ChainSearch, question: Question, best_ns: int | None) -> ChainAnswer | None:
    """What the sweep knows; ``None`` if there is no chain."""
    if not chain.is_chain:
        return None
    if question.objective == "time":
        return chain.fastest(question.allowed_bytes, best_ns)
    least = chain.least_peak()
    return None if least is None else chain.fastest(min(least, question.allowed_bytes), None)


def _infeasible(
    graph: ModelGraph, analysis: Analysis, question: Question, chain: ChainSearch | None, prices: Prices
) -> InfeasibleBudgetError:
    least = None if chain is None else chain.least_peak()
    answer = None if chain is None or least is None else chain.fastest(least, None)
    if answer is not None and answer.candidate is not None:
        prices(answer.candidate)
    smallest: Candidate = min(prices.known, key=lambda chosen: (prices(chosen).peak_bytes, chosen.units))
    timeline = prices(smallest)
    return InfeasibleBudgetError(
        question.allowed_bytes,
        timeline.peak_bytes,
        timeline.peak_unit,
        timeline.peak_at,
        remedies(graph, analysis, question, smallest, timeline),
    )


def _optimal(timeline: Timeline, bound_ns: int, space: str) -> Optimal:
    """What is known about better plans, from a time that no plan of the space undercuts."""
    if timeline.step_ns <= bound_ns:
        return Optimal(status="proved", bound_ns=timeline.step_ns, gap=0.0, space=space)
    gap = round(timeline.step_ns / bound_ns - 1, 6) if bound_ns else -1.0
    return Optimal(status="bounded" if bound_ns else "heuristic", bound_ns=bound_ns, gap=gap, space=space)
