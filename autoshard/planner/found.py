"""What a search answers, and the price of candidates."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.analysis.space import Analysis
from autoshard.ir import ModelGraph
from autoshard.plan.schema import Decisions, Optimal
from autoshard.planner.candidate import Candidate, decide
from autoshard.request import Question
from autoshard.simulate import StepProfile, Timeline, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer of a search.

    Attributes:
        decisions: what to apply.
        timeline: what it costs.
        optimal: what is known about better plans.
        num_priced: plans that were priced.
        priced: the step of each candidate that the fold has priced, the baselines among them.
    """

    decisions: Decisions
    timeline: Timeline
    optimal: Optimal
    num_priced: int
    priced: Mapping[Candidate, Timeline]


class Prices:
    """Prices of candidates, each priced once."""

    def __init__(self, graph: ModelGraph, analysis: Analysis, question: Question, profile: StepProfile) -> None:
        self.graph, self.analysis, self.question, self.profile = graph, analysis, question, profile
        self.known: dict[Candidate, tuple[Decisions, Timeline]] = {}

    def __call__(self, chosen: Candidate) -> Timeline:
        """The step under a candidate."""
        if chosen not in self.known:
            decisions = decide(self.graph, self.analysis.space, self.question, chosen)
            self.known[chosen] = decisions, simulate(self.graph, decisions, self.question, self.profile)
        return self.known[chosen][1]

    def fits(self, chosen: Candidate) -> bool:
        """Its projected peak is within the allowance."""
        return self(chosen).peak_bytes <= self.question.allowed_bytes

    def rank(self, chosen: Candidate) -> tuple[object, ...]:
        """Least is best: time, then peak, then fewer units, then names (the objective ``memory`` asks peak first)."""
        timeline = self(chosen)
        cost = (timeline.step_ns, timeline.peak_bytes)
        if self.question.objective == "memory":
            cost = cost[::-1]
        return (*cost, len(chosen.units), len(chosen.recompute), chosen.units, tuple(sorted(chosen.kept)))
