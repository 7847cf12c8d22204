"""The search space of a chain: what the root holds, which places recompute, and the worlds that follow from it.

What is decided once and paid everywhere is enumerated here, outside the sweep: the modules that the root holds, and
whether it reshards. A world is used only if it prices its reference plan as the fold does, to the nanosecond and byte.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from autoshard.analysis.space import Analysis
from autoshard.ir import ModelGraph
from autoshard.planner.build import build_world
from autoshard.planner.candidate import Candidate, candidate, decide
from autoshard.planner.chain import Chain, find_chain, pieces, spine
from autoshard.planner.labels import Tables, price
from autoshard.planner.stock import Stock
from autoshard.planner.world import Frame, Option, Start, World
from autoshard.request import Question
from autoshard.simulate import StepProfile, profile_step, simulate

MAX_ROOT_CHOICES = 2
"""Modules beside the blocks of which each may be left to the root, in every combination; more of them are units."""
MAX_SMALL = 5
"""In a chain of at most so many places each may be left to the root, and the root may reshard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootChoice:
    """What is decided once and paid everywhere.

    Attributes:
        held: modules of the chain that the root holds.
        reshards: the root reshards after forward.
    """

    held: tuple[str, ...]
    reshards: bool


class ChainSpace:
    """The chain of a model and its worlds.

    Attributes:
        outermost: atoms of the chain, in execution order.
        recomputable: those of their modules, and of the modules inside, that may recompute.
    """

    def __init__(self, graph: ModelGraph, analysis: Analysis, question: Question, profile: StepProfile) -> None:
        self.graph, self.analysis, self.question, self.profile = graph, analysis, question, profile
        sizes = {param.key: param.nbytes for param in graph.params}
        self.nbytes = {atom.module: sum(sizes[key] for key in atom.params) for atom in analysis.space.atoms}
        self.outermost = spine(analysis, self.nbytes)
        in_chain = {key for atom in self.outermost for key in atom.params}
        self.has_residual = any(
            param.key not in in_chain and param.key not in analysis.space.replicated for param in graph.params
        )
        self.pre_order = tuple(node.fqn for node in graph.modules)
        modules = {fqn for atom in self.outermost for fqn in (atom.module, *atom.children)}
        self.recomputable = tuple(fqn for fqn in analysis.space.recomputable if fqn in modules)
        if question.recompute == "none":
            self.recomputable = ()
        self.again: StepProfile | None = None
        self.frames: dict[RootChoice, Frame] = {}
        self.stock: Stock | None = None
        self.has_again = False

    def root_choices(self) -> Iterator[RootChoice]:
        """All of them, the root that holds least first."""
        free = self._free_for_root()
        may_reshard = not self.analysis.space.root_must_keep
        reshards = [self.question.reshard == "always" and may_reshard]
        if self.question.reshard == "auto" and may_reshard and len(self.outermost) <= MAX_SMALL:
            reshards = [False, True]
        for count in range(len(free) + 1):
            for held in combinations(free, count):
                if count < len(self.outermost):
                    has_params = bool(held) or self.has_residual
                    yield from (RootChoice(held=held, reshards=each) for each in reshards[: None if has_params else 1])

    def _free_for_root(self) -> tuple[str, ...]:
        if len(self.outermost) <= MAX_SMALL:
            return tuple(atom.module for atom in self.outermost)
        alone = [atom for atom in self.outermost if not atom.repeat_class]
        largest = sorted(alone, key=lambda atom: (-self.nbytes[atom.module], atom.order))[:MAX_ROOT_CHOICES]
        return tuple(atom.module for atom in sorted(largest, key=lambda atom: atom.order))

    def chain(self, choice: RootChoice, depth: int) -> Chain | None:
        """The chain under a choice."""
        left = [atom for atom in self.outermost if atom.module not in choice.held]
        return find_chain(
            self.analysis, self.profile, left, depth, frozenset(self.recomputable), self.pre_order, self.nbytes
        )

    def frame(self, choice: RootChoice, chain: Chain) -> Frame:
        """What the worlds of a chain are made from."""
        places = pieces(chain.places, self.analysis.space)
        modules = [tuple(place.module for place in piece) for piece in places] + [(fqn,) for fqn in chain.idle]
        chosen = candidate(modules, root_reshards=choice.reshards)
        decisions = decide(self.graph, self.analysis.space, self.question, chosen)
        if not self.has_again:
            self.has_again = True
            if self.recomputable:
                self.again = profile_step(self.graph, self.question, self.recomputable)
        return Frame(
            graph=self.graph,
            analysis=self.analysis,
            question=self.question,
            profile=self.profile,
            again=self.again,
            reference=simulate(self.graph, decisions, self.question, self.profile),
            decisions=decisions,
        )

    def is_true(self, choice: RootChoice, tables: Tables) -> bool:
        """The world prices its reference plan as the fold does: each outermost place a unit that reshards."""
        frame = self.frames.get(choice)
        return frame is not None and _reference_price(tables, frame) in (None, _price(frame))

    def world(self, choice: RootChoice, depth: int) -> World | None:
        """The world of a choice, ``None`` if the model is no chain under it."""
        chain = self.chain(choice, depth)
        if chain is None:
            return None
        frame = self.frames[choice] = self.frame(choice, chain)
        if self.stock is None:
            self.stock = Stock(frame)
        return build_world(frame, chain, self.stock)


def _price(frame: Frame) -> tuple[int, int]:
    return frame.reference.step_ns, frame.reference.peak_bytes


def _reference_price(tables: Tables, frame: Frame) -> tuple[int, int] | None:
    """Price of the frame's reference plan in the world; ``None`` if it does not stand in it."""
    world = tables.world
    wanted = {unit.modules: unit.reshard for unit in frame.decisions.units}
    start = next((each for each in world.starts(1) if all(wanted.get(m) == r for m, r in each.units)), None)
    if start is None or start.recompute:
        return None
    options: list[Option] = []
    border = start.stop
    while border < world.chain.num_borders - 1:
        found = [
            each
            for each in world.options(border, 1)
            if not any(each.again) and wanted.get(world.modules(border, each)) == each.reshard
        ]
        if not found:
            return None
        options.append(found[0])
        border += found[0].length
    return price(tables, start, options)


def to_candidate(world: World, start: Start, options: Sequence[Option]) -> Candidate:
    """The plan of a start and options."""
    units = [modules for modules, _ in start.units]
    kept = [modules for modules, reshard in start.units if not reshard]
    recompute = list(start.recompute)
    border = start.stop
    for option in options:
        modules = world.modules(border, option)
        units.append(modules)
        if not option.reshard:
            kept.append(modules)
        recompute += [module for module, again in zip(modules, option.again, strict=True) if again]
        border += option.length
    units += [(fqn,) for fqn in world.chain.idle]
    return candidate(units, kept, tuple(recompute), world.reshards_root)
