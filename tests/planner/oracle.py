"""A brute-force oracle: every plan of a small model, and a replay of FSDP2 of its own that says what each takes.

The replay is written from FSDP2's rules as torch 2.13 has them and shares nothing with ``simulate`` but the sizes of
units: clocks in plain variables, bytes in one counter, hooks in the order in which FSDP2 runs them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from autoshard.analysis import Analysis
from autoshard.analysis.ownership import application_order
from autoshard.ir import ModelGraph
from autoshard.plan.schema import Decisions
from autoshard.planner.candidate import Candidate, candidate
from autoshard.request import Question
from autoshard.simulate import Setup, StepProfile, UnitSizes, profile_step, simulate


def every_plan(graph: ModelGraph, analysis: Analysis, longest: int) -> list[Candidate]:
    """Every legal plan: each module a unit or not, inside another one or not, or in a list with its neighbours."""
    space, tree = analysis.space, {node.fqn: node for node in graph.modules}
    pairs = set(space.groupable)
    units: list[tuple[str, ...]] = [(atom.module,) for atom in space.atoms if atom.module]
    found = sorted(pairs)
    while found and len(found[0]) <= longest:
        units += found
        found = [(*unit, second) for unit in found for first, second in sorted(pairs) if first == unit[-1]]

    def above(fqn: str) -> Iterator[str]:
        while fqn:
            fqn = tree[fqn].parent
            yield fqn

    def choose(
        rest: list[tuple[str, ...]], taken: tuple[tuple[str, ...], ...]
    ) -> Iterator[tuple[tuple[str, ...], ...]]:
        if not rest:
            yield taken
            return
        yield from choose(rest[1:], taken)
        yield from choose([unit for unit in rest[1:] if not set(unit) & set(rest[0])], (*taken, rest[0]))

    plans = []
    for chosen in choose(units, ()):
        try:
            application_order(graph, (*chosen, ("",)))
        except ValueError:
            continue
        around = {outer for unit in chosen for module in unit for outer in above(module)}
        may = [fqn for fqn in space.recomputable if fqn not in around]
        for flags, again, root in product(
            product((True, False), repeat=len(chosen)), product((False, True), repeat=len(may)), (False, True)
        ):
            kept = [unit for unit, reshard in zip(chosen, flags, strict=True) if not reshard]
            modules = tuple(fqn for fqn, each in zip(may, again, strict=True) if each)
            plans.append(candidate(chosen, kept, modules, root))
    return list(dict.fromkeys(plans))


def is_along_chain(graph: ModelGraph, analysis: Analysis, plan: Candidate) -> bool:
    """Units side by side, of siblings; what is cut is cut whole, and reduced at once; what recomputes is in a unit."""
    deferred = {atom.module for atom in analysis.space.atoms if atom.module and atom.defers_post_backward}
    tree = {node.fqn: node for node in graph.modules}
    members = {module for unit in plan.units for module in unit}
    for module in members:
        parent = tree[module].parent
        is_cut_whole = all(child in members for child in tree[parent].children)
        if parent and (parent in members or parent in deferred or not is_cut_whole):
            return False
    side_by_side = all(len({tree[module].parent for module in unit}) == 1 for unit in plan.units)
    return side_by_side and set(plan.recompute) <= members


@dataclass(frozen=True, slots=True)
class Price:
    """What the replay says of a plan."""

    step_ns: int
    peak_bytes: int


def replay(graph: ModelGraph, decisions: Decisions, question: Question) -> Price:
    """One step under a plan whose units stand side by side and run once; prices of ops and units are those given."""
    profile = profile_step(graph, question, decisions.recompute)
    setup = simulate(graph, decisions, question, profile).setup
    return _Step(graph, decisions, setup, profile).run()


class _Step:
    """Plain variables: ``c`` compute, ``h`` host, ``g`` copy-in stream, ``s`` communicator, ``live`` bytes."""

    def __init__(self, graph: ModelGraph, decisions: Decisions, setup: Setup, profile: StepProfile) -> None:
        self.setup, self.profile, self.decisions = setup, profile, decisions
        self.c = self.h = self.g = self.s = self.copied = self.done = self.input_end = 0
        self.units = setup.units
        tree_order = {node.fqn: place for place, node in enumerate(graph.modules)}
        self.by_tree = sorted(self.units, key=lambda unit: min(tree_order[module] for module in unit.modules))
        self.grads = {key: setup.gradient_bytes[key] for key in setup.gradient_bytes}
        self.live = sum(unit.sharded_bytes for unit in self.units) + setup.optimizer.state_bytes
        self.live += profile.input_bytes + profile.buffer_bytes
        self.grad_bytes = 0
        self.peak = self.live + profile.between[0]
        self.deferred = self.input_bytes = self.position = 0
        self.arrival: dict[str, int] = {}
        self.gathered: set[str] = set()
        self.reduced: set[str] = set()

    def run(self) -> Price:
        entries = []
        for unit in self.units:
            runs = [(self.profile.runs[module][0], module) for module in unit.modules if module in self.profile.runs]
            runs.sort(key=lambda item: item[0].forward)
            for place, (each, _) in enumerate(runs):
                is_first, is_last = place == 0, place == len(runs) - 1
                entries.append((each.forward[0], 1, each.rank, "in", unit, is_first, is_last))
                entries.append((each.forward[1], 0, -each.rank, "out", unit, is_first, is_last))
        order: list[UnitSizes] = []
        for at, _, _, what, unit, is_first, is_last in sorted(entries, key=lambda item: item[:3]):
            self.ops(at)
            if what == "in" and unit.keys:
                self.h += self.setup.unit_host_ns
                if is_first:
                    self.all_gather(unit)
                    self.wait(unit, deferred=True)
            elif what == "out":
                if is_last and unit.keys:
                    if unit.reshard:
                        self.free(unit)
                    order.append(unit)
                if unit.modules == ("",):
                    self.g = max(self.g, self.copied)
                    self.live -= self.deferred
                    self.deferred = 0
        self.ops(self.profile.num_forward)
        self.backward(order)
        self.c = max(self.c, self.h) + self.setup.optimizer.step_ns
        self.note(self.setup.optimizer.temporary_bytes)
        return Price(max(self.c, self.h), self.peak)

    def backward(self, order: list[UnitSizes]) -> None:
        hooks = []
        for unit in self.units:
            runs = sorted(
                (self.profile.runs[module][0] for module in unit.modules if module in self.profile.runs),
                key=lambda run: run.forward,
            )
            if not runs:
                continue
            if runs[-1].output_needs_grad and runs[-1].backward is not None:
                hooks.append((runs[-1].backward[0], 1, -runs[-1].rank, unit))
            if unit.keys and runs[0].inputs_need_grad and runs[0].backward is not None:
                hooks.append((runs[0].backward[1], 0, -runs[0].rank, unit))
            for module in unit.modules:
                for first, stop in self.profile.replays.get(module, ()):
                    hooks += [(first, 2, 0, None), (stop, 2, 0, None)]
        for at, kind, _, unit in sorted(hooks, key=lambda item: item[:3]):
            self.ops(at)
            if unit is None or not unit.keys:
                continue
            if kind == 0:
                self.post_backward(unit)
                continue
            self.h += self.setup.unit_host_ns
            self.all_gather(unit)
            self.wait(unit, deferred=False)
            place = order.index(unit)
            if place:
                self.all_gather(order[place - 1])
        self.ops(self.profile.num_ops)
        for unit in self.by_tree:
            if unit.keys:
                if unit.name not in self.reduced:
                    self.post_backward(unit)
                self.c = max(self.c, self.done)
        self.release()

    def ops(self, until: int) -> None:
        if until <= self.position:
            return
        profile, first = self.profile, self.position
        for op in range(first, until):
            self.grad_bytes += sum(self.grads[m.key] for m in profile.gradients if m.born == op and m.key in self.grads)
            self.peak = max(self.peak, self.live + self.grad_bytes + profile.during[op])
        self.c = max(self.c, self.h) + profile.elapsed_ns[until] - profile.elapsed_ns[first]
        self.h += profile.launch_ns * (profile.launched[until] - profile.launched[first])
        self.c = max(self.c, self.h)
        self.position = until

    def note(self, more: int = 0) -> None:
        self.peak = max(self.peak, self.live + self.grad_bytes + self.profile.between[self.position] + more)

    def all_gather(self, unit: UnitSizes) -> None:
        if unit.name in self.gathered or unit.name in self.arrival:
            return
        self.note(unit.cast_bytes + unit.buffer_bytes)
        self.live += unit.buffer_bytes
        self.g = max(self.g, self.h) + unit.copy_in_ns
        self.s = max(self.s, self.g) + unit.gather_ns
        self.arrival[unit.name] = self.s

    def wait(self, unit: UnitSizes, deferred: bool) -> None:
        if unit.name not in self.arrival:
            return
        self.c = max(self.c, self.arrival.pop(unit.name)) + unit.copy_out_ns
        self.gathered.add(unit.name)
        self.live += unit.unsharded_bytes
        self.note(unit.transposed_bytes)
        if deferred:
            self.g = max(self.g, self.copied)
            self.live -= self.deferred
            self.deferred, self.copied = unit.buffer_bytes, self.c
        else:
            self.live -= unit.buffer_bytes
            self.g = max(self.g, self.c)

    def free(self, unit: UnitSizes) -> None:
        if unit.name in self.gathered:
            self.gathered.remove(unit.name)
            self.live -= unit.unsharded_bytes

    def release(self) -> None:
        self.c = max(self.c, self.input_end)
        self.live -= self.input_bytes
        self.input_bytes = self.input_end = 0

    def post_backward(self, unit: UnitSizes) -> None:
        self.reduced.add(unit.name)
        keys = {moment.key for moment in self.profile.gradients if moment.key in unit.keys}
        was_gathered = unit.name in self.gathered
        self.free(unit)
        self.release()
        reduction = unit.reduction(keys) if was_gathered else None
        if reduction is None:
            return
        self.live += reduction.input_bytes
        self.note()
        self.grad_bytes -= reduction.unsharded_bytes
        self.live += reduction.held_bytes + reduction.output_bytes
        self.note()
        self.live += reduction.sharded_bytes
        if not reduction.is_cast:
            self.live -= reduction.output_bytes
        self.note()
        self.live -= reduction.held_bytes + (reduction.output_bytes if reduction.is_cast else 0)
        self.c += reduction.copy_ns
        self.s = max(self.c, self.h, self.s) + reduction.reduce_scatter_ns
        self.input_bytes, self.input_end = reduction.input_bytes, self.s
        self.done = max(self.done, self.s)
