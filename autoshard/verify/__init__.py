"""Verify: is a plan right for a model? The rules on any plan, also a hand-written one. Imports no torch.

The verifier trusts no planner: it looks at what each unit really owns and reads the captured facts by its own code.
Where it asks the same as a rule of the legal space it gives the same code.
"""

from autoshard.analysis import Analysis
from autoshard.errors import Diagnostic
from autoshard.findings import condense
from autoshard.ir import ModelGraph
from autoshard.plan.schema import Decisions
from autoshard.verify.rules import RULES
from autoshard.verify.subject import subject_of

__all__ = ["verify_plan"]


def verify_plan(plan: Decisions, graph: ModelGraph, analysis: Analysis) -> tuple[Diagnostic, ...]:
    """Every rule that a plan breaks for a model; without findings of severity ``error`` the plan is legal.

    Findings that are alike are one diagnostic; errors come first.

    Args:
        plan: the decisions, whoever made them.
        graph: the model.
        analysis: facts about the model; of its space only the forced decisions are used.
    """
    subject = subject_of(plan, graph, analysis)
    return condense(found for rule in RULES for found in rule(subject))
