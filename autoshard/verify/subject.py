"""What the rules look at: a plan and a graph, with the plan's names looked up in the graph.

Names that the graph does not have are kept apart; the rules go on with the rest, so that all findings come at once.
"""

from dataclasses import dataclass

from autoshard.analysis import Analysis
from autoshard.analysis.order import Run, runs
from autoshard.analysis.ownership import owners
from autoshard.errors import Severity
from autoshard.findings import Finding
from autoshard.ir import ModelGraph
from autoshard.ir.tree import Tree
from autoshard.plan.schema import Decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A plan beside the graph that it is for.

    Attributes:
        plan: the decisions.
        graph: the model.
        analysis: the facts about the model.
        tree: containment.
        units: canonical FQNs of the modules of each unit; unknown ones are left out.
        owned: keys of the parameters that each unit owns.
        runs: runs of each module.
    """

    plan: Decisions
    graph: ModelGraph
    analysis: Analysis
    tree: Tree
    units: tuple[tuple[str, ...], ...]
    owned: tuple[tuple[str, ...], ...]
    runs: dict[str, tuple[Run, ...]]

    @property
    def unit_of(self) -> dict[str, int]:
        """Index of the first unit that names a module."""
        found: dict[str, int] = {}
        for index, modules in enumerate(self.units):
            for module in modules:
                found.setdefault(module, index)
        return found


def subject_of(plan: Decisions, graph: ModelGraph, analysis: Analysis) -> Subject:
    """A plan with its names looked up."""
    tree = Tree.of(graph)
    found = [[tree.canonical(module) for module in unit.modules] for unit in plan.units]
    units = tuple(tuple(fqn for fqn in modules if fqn is not None) for modules in found)
    by_module: dict[str, list[Run]] = {}
    for run in runs(graph):
        by_module.setdefault(run.module, []).append(run)
    return Subject(
        plan=plan,
        graph=graph,
        analysis=analysis,
        tree=tree,
        units=units,
        owned=owners(graph, units, plan.replicated),
        runs={fqn: tuple(of_module) for fqn, of_module in by_module.items()},
    )


def finding(
    code: str, where: str, message: str, remedy: str = "", severity: Severity = "error", cause: str = ""
) -> Finding:
    """A finding; the root's FQN is written out. Findings of one code and one cause are told together."""
    return Finding(
        code=code, severity=severity, where=where or "(root)", message=message, remedy=remedy, cause=cause or message
    )


def named(modules: tuple[str, ...]) -> str:
    """A unit as people read it."""
    return ", ".join(module or "(root)" for module in modules) or "(nothing)"
