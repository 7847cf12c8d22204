"""Plans that are there already, scored by the same fold as ours and held against the same rules."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoshard.analysis import analyze
from autoshard.errors import Diagnostic, InfeasibleBudgetError
from autoshard.plan import Decisions
from autoshard.request import Request
from autoshard.simulate import simulate
from autoshard.studies.subject import Subject
from autoshard.verify import verify_plan

OURS = "autoshard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a plan costs.

    Attributes:
        name: whose plan it is.
        verdict: ``fits``, ``does not fit``, ``not legal``, or ``none fits`` for ours where there is none.
        num_units: its units.
        num_recompute: blocks that recompute.
        peak_bytes: projected peak, the least there is where ours does not fit; 0 if not legal.
        step_ns: time of one step under the cost model; 0 if not legal.
        exposed_ns: part of it in which compute waits for communication.
        findings: what is wrong with it, errors first.
    """

    name: str
    verdict: str
    num_units: int
    num_recompute: int
    peak_bytes: int
    step_ns: int
    exposed_ns: int
    findings: tuple[Diagnostic, ...] = ()


def compare_plans(
    subject: Subject,
    request: Request,
    plans: Mapping[str, Decisions],
    batch: int | None = None,
    seq: int | None = None,
) -> tuple[Score, ...]:
    """Ours first, then the given plans in their order.

    A given plan keeps its own mesh and precision; the device, the optimizer and the allowance are the request's.

    Raises:
        AutoshardError: whatever ``Subject.ask`` raises, but that a plan of ours does not fit.
    """
    ours = _ours(subject, request, batch, seq)
    return (ours, *(_score(subject, request, name, plan, batch, seq) for name, plan in plans.items()))


def _ours(subject: Subject, request: Request, batch: int | None, seq: int | None) -> Score:
    try:
        answer = subject.ask(request, batch, seq)
    except InfeasibleBudgetError as error:
        return Score(
            name=OURS,
            verdict="none fits",
            num_units=0,
            num_recompute=0,
            peak_bytes=error.smallest_bytes,
            step_ns=0,
            exposed_ns=0,
        )
    found = answer.found
    return Score(
        name=OURS,
        verdict="fits",
        num_units=len(found.decisions.units),
        num_recompute=len(found.decisions.recompute),
        peak_bytes=found.timeline.peak_bytes,
        step_ns=found.timeline.step_ns,
        exposed_ns=found.timeline.exposed_ns,
    )


def _score(subject: Subject, request: Request, name: str, plan: Decisions, batch: int | None, seq: int | None) -> Score:
    question = subject.question(replace(request, devices=plan.num_devices, mesh="auto"))
    # A plan computes in its own dtypes, whatever the request says.
    question = replace(question, param_dtype=plan.precision.param, reduce_dtype=plan.precision.reduce)
    graph = subject.graph(question, batch, seq)
    methods = tuple((method.module, method.method) for method in plan.methods)
    findings = verify_plan(plan, graph, analyze(graph, num_shards=plan.num_shards, methods=methods))
    units, recompute = len(plan.units), len(plan.recompute)
    if any(found.severity == "error" for found in findings):
        return Score(
            name=name,
            verdict="not legal",
            num_units=units,
            num_recompute=recompute,
            peak_bytes=0,
            step_ns=0,
            exposed_ns=0,
            findings=findings,
        )
    timeline = simulate(graph, plan, question)
    return Score(
        name=name,
        verdict="fits" if timeline.peak_bytes <= question.allowed_bytes else "does not fit",
        num_units=units,
        num_recompute=recompute,
        peak_bytes=timeline.peak_bytes,
        step_ns=timeline.step_ns,
        exposed_ns=timeline.exposed_ns,
        findings=findings,
    )
