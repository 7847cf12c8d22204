"""The sweep on all worlds of a model: what the root holds is enumerated, group lengths come in stages.

Short groups first, since their worlds are small and mostly hold the best plan; their answer is what longer ones have to
beat. A narrow beam finds plans, and where its bound reaches them it is the proof; else wider ones follow, and at last
the sweep without a beam, up to a count of labels.
"""

from dataclasses import dataclass

from autoshard.analysis.space import Analysis
from autoshard.ir import ModelGraph
from autoshard.planner.candidate import Candidate
from autoshard.planner.frame import ChainSpace, RootChoice, to_candidate
from autoshard.planner.labels import Tables, price
from autoshard.planner.suffix import IMPOSSIBLE
from autoshard.planner.sweep import LONGEST, Sweeper, least_peak
from autoshard.planner.world import Option, Start, World
from autoshard.request import Question
from autoshard.simulate import StepProfile

STAGES = (1, LONGEST)
"""Group lengths."""
DEPTH = 1
"""Levels at which blocks are cut."""
BEAMS = (5, 50)
MAX_LABELS = 4_000
"""Labels that a sweep without a beam keeps before it is given up."""
FEW_OPTIONS = 400
"""A world of at most so many options is swept to the end, whatever the gap."""
HOPELESS = {BEAMS[-1]: 50, None: 2_000}
"""A gap of more than one part in so many is not closed by such a beam, or by a sweep without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainAnswer:
    """What the sweep knows.

    Attributes:
        candidate: the best plan, ``None`` if it knows none that is better than what was known before.
        step_ns: its step time.
        peak_bytes: its peak.
        bound_ns: no plan of the space is faster; ``IMPOSSIBLE`` if none fits.
    """

    candidate: Candidate | None
    step_ns: int
    peak_bytes: int
    bound_ns: int


@dataclass(slots=True)
class _Best:
    step_ns: int
    plan: tuple[Tables, Start, tuple[Option, ...]] | None = None


class ChainSearch:
    """Answers about one model, whatever the allowance: its worlds are made once.

    Attributes:
        is_chain: the model is a chain, so that there is something to walk along.
        is_whole: it is one whatever the root holds of what may be left to it.
        is_exact: no world of a chain prices its reference plan otherwise than the fold.
    """

    def __init__(self, graph: ModelGraph, analysis: Analysis, question: Question, profile: StepProfile) -> None:
        self.space = ChainSpace(graph, analysis, question, profile)
        self.worlds: dict[RootChoice, Tables | None] = {}
        self.has_false = False
        self.is_true: dict[RootChoice, bool] = {}
        every = set(self.space.recomputable) == set(analysis.space.recomputable)
        is_asked = graph.frontend != "tree" and question.num_shards > 1 and (every or question.recompute != "full")
        self.choices = tuple(self.space.root_choices()) if is_asked else ()
        self.choices = tuple(choice for choice in self.choices if self._world(choice) is not None)
        self.is_chain = bool(self.choices)
        self.is_whole = None not in self.worlds.values()
        self.is_exact = self.is_chain and not self.has_false

    def _world(self, choice: RootChoice) -> Tables | None:
        if choice not in self.worlds:
            world = self.space.world(choice, DEPTH)
            tables = None if world is None else Tables(world)
            if tables is not None and not self.space.is_true(choice, tables):
                self.has_false, tables = True, None
            self.worlds[choice] = tables
        return self.worlds[choice]

    def fastest(self, allowed_bytes: int, known_ns: int | None) -> ChainAnswer:
        """The fastest plan along the chain.

        Args:
            allowed_bytes: what tensors may occupy.
            known_ns: step time of the best plan known that fits, ``None`` if none is.
        """
        best = _Best(IMPOSSIBLE if known_ns is None else known_ns)
        worlds = ((choice, self.worlds[choice]) for choice in self.choices)
        sweepers = {choice: Sweeper(tables, allowed_bytes) for choice, tables in worlds if tables is not None}
        bounds: dict[RootChoice, int] = {}
        for longest in STAGES:
            beams = BEAMS[:1] if longest < STAGES[-1] else (*BEAMS, None)
            for choice, sweeper in sweepers.items():
                if bounds.get(choice, 0) < best.step_ns:
                    bounds[choice] = _sweeps(sweeper, longest, beams, best)
        bound_ns = min(bounds.values(), default=0)
        if best.plan is None:
            return ChainAnswer(candidate=None, step_ns=0, peak_bytes=0, bound_ns=bound_ns)
        tables, start, options = best.plan
        step_ns, peak_bytes = price(tables, start, options)
        return ChainAnswer(
            candidate=to_candidate(tables.world, start, options),
            step_ns=step_ns,
            peak_bytes=peak_bytes,
            bound_ns=bound_ns,
        )

    def least_peak(self) -> int | None:
        """The lowest peak of all plans along the chain; ``None`` if the model is no chain."""
        least: int | None = None
        for longest in STAGES:
            for choice in self.choices:
                tables = self.worlds[choice]
                if tables is not None:
                    least = least_peak(tables, longest, IMPOSSIBLE if least is None else least)
        return least


def _sweeps(sweeper: Sweeper, longest: int, beams: tuple[int | None, ...], best: _Best) -> int:
    """Sweeps one world; the least time that any of its plans can take.

    The bound of the first label holds for groups of any length; what a beam proves holds for those that it looked at.
    """
    bound_ns = sweeper.root_bound()
    proved_ns = bound_ns
    tables = sweeper.tables
    for beam in beams:
        open_ns = best.step_ns - proved_ns
        if open_ns <= 0 or (open_ns * HOPELESS.get(beam, 0) > best.step_ns and _is_large(tables.world, longest)):
            break
        swept = sweeper.sweep(longest, best.step_ns, beam, MAX_LABELS if beam is None else None)
        proved_ns = max(proved_ns, swept.bound_ns)
        if swept.start is not None:
            best.step_ns, best.plan = swept.step_ns, (tables, swept.start, swept.options)
        if swept.num_labels > MAX_LABELS:
            break  # without a beam there would be more
    return proved_ns if None in beams else bound_ns


def _is_large(world: World, longest: int) -> bool:
    count = 0
    for border in range(world.chain.num_borders):
        count += len(world.options(border, longest))
        if count > FEW_OPTIONS:
            return True
    return False
