"""Rules about modules: what bars one from being a unit.

A table of small predicates, asked in order; the first that gives a reason bars the module, and its parameters stay with
the nearest ancestor that may be a unit. Rules that depend on other units (shared modules, dtypes) stand in ``atoms``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.analysis.access import reader, uncovered_reads
from autoshard.analysis.facts import Facts
from autoshard.analysis.order import Run
from autoshard.errors import Severity
from autoshard.findings import Finding

Keys = tuple[str, ...]

EXACT_TYPE = "exact-type"
"""Trait of a module whose very class the step asks for."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a module may not be a unit.

    Attributes:
        message: for people.
        cause: what makes it alike to others of the same rule; empty for the message.
    """

    message: str
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRule:
    """One rule about a module that would be a unit.

    Attributes:
        code: of its diagnostics.
        severity: of its diagnostics.
        reason: why the module may not be a unit that owns these parameters, ``None`` if it may.
        remedy: what to do about it; empty where the plan needs nothing.
    """

    code: str
    severity: Severity
    reason: Callable[[Facts, str, Keys], Reason | None]
    remedy: str = ""


def _no_forward(facts: Facts, fqn: str, keys: Keys) -> Reason | None:
    node = facts.tree.nodes[fqn]
    if node.has_forward:
        return None
    return Reason("it has no forward of its own, so it is no unit; the modules in it may be")


def _on_demand(facts: Facts, fqn: str, keys: Keys) -> Reason | None:
    around = facts.tree.above(fqn) | {fqn}
    for module, sign in facts.on_demand.items():
        if module in around:
            return Reason(f"{sign}, so ranks may differ in what they run, and neither it nor a part of it is a unit")
    return None


def _tied(facts: Facts, fqn: str, keys: Keys) -> Reason | None:
    inside = facts.tree.below(fqn)
    for key in keys:
        for holder in facts.tree.params[key].holders:
            if holder not in inside:
                elsewhere = holder or "(root)"
                return Reason(f"its parameter {key} is also registered in {elsewhere}, and a parameter has one owner")
    return None


def _read_outside(facts: Facts, fqn: str, keys: Keys) -> Reason | None:
    for key in keys:
        stacks = uncovered_reads(facts.tree.params[key], (fqn,), facts.updates.get(key, frozenset()))
        if stacks:
            who = reader(stacks[0])
            message = f"its parameter {key} is read by {who} while this module's forward is not running"
            return Reason(message, cause=f"read by {who}")
    return None


def _not_called(facts: Facts, fqn: str, keys: Keys) -> Reason | None:
    if facts.tree.nodes[fqn].num_calls or is_never_used(facts, fqn):
        return None
    return Reason("parts of it run, but its own forward does not, so nothing would unshard it")


def is_never_used(facts: Facts, fqn: str) -> bool:
    """Neither the module nor anything in it runs, and nothing reads a parameter in it."""
    tree = facts.tree
    return not any(tree.nodes[inner].num_calls for inner in tree.below(fqn)) and not any(
        tree.params[key].readers for key in tree.keys(fqn)
    )


def _no_hook(facts: Facts, fqn: str, keys: Keys) -> Reason | None:
    for run in facts.runs.get(fqn, ()):
        reason = hidden_output(run)
        if reason is not None:
            return Reason(reason)
    return None


def _exact_type(facts: Facts, fqn: str, keys: Keys) -> Reason | None:
    node = facts.tree.nodes[fqn]
    if EXACT_TYPE not in node.traits:
        return None
    name = node.class_name.rpartition(".")[2]
    return Reason(f"the step asks for its exact class ({name}), and fully_shard gives a unit a derived one", name)


def _late_hook(facts: Facts, fqn: str, keys: Keys) -> Reason | None:
    for run in facts.runs.get(fqn, ()):
        early = next((key for key in run.span.early_params if key in keys), None)
        if early is not None:
            cause = late_cause(run)
            return Reason(f"{cause}, so backward reads {early} before FSDP2 has gathered it", cause)
    return None


def late_cause(run: Run) -> str:
    """Why backward enters a run before the hook on its result has fired."""
    if run.span.output_is_view:
        return "its result is a view that later code changes in place, which drops FSDP2's hook"
    if run.span.escapes:
        return "a tensor that is made in it leaves by another way than its result"
    return "backward enters it by another way than through its result"


def _changes_input(facts: Facts, fqn: str, keys: Keys) -> Reason | None:
    if not keys or not any(run.span.changes_input for run in facts.runs.get(fqn, ())):
        return None
    return Reason("its forward changes one of its inputs in place, of which FSDP2 hands in a view that forbids it")


def hidden_output(run: Run) -> str | None:
    """Why FSDP2 cannot put its pre-backward hook on a run's result; ``None`` if it can or need not."""
    span = run.span
    if span.backward is None:
        return None
    kind = span.output_kind
    name = kind.removeprefix("opaque:")
    if not span.output_needs_grad:
        what = f"its result is a {name}" if kind != name else f"no tensor in its result ({kind}) has a gradient"
        return f"{what}; FSDP2 finds nothing there to put its hook on, but backward passes through the module"
    if kind != name and _bytes_read_later(run) > span.output_bytes:
        return f"a part of its result is a {name}, in which FSDP2 finds no tensors, and later code uses it"
    return None


def _bytes_read_later(run: Run) -> int:
    """Bytes of the distinct storages that the run made and that later ops of its region read."""
    first, end = run.span.forward
    later = {index for op in run.region.forward[end:] for index in op.inputs}
    storages = run.region.storages
    return sum(
        storages[index].nbytes
        for index in later
        if storages[index].born.phase == "forward" and first <= storages[index].born.index < end
    )


MODULE_RULES = (
    ModuleRule(code="AS201", severity="note", reason=_no_forward),
    ModuleRule(
        code="AS218",
        severity="warning",
        reason=_on_demand,
        remedy="nothing if every rank runs the same ones; else see that all example inputs together reach all of them",
    ),
    ModuleRule(code="AS205", severity="note", reason=_tied),
    ModuleRule(
        code="AS203",
        severity="note",
        reason=_read_outside,
        remedy="nothing; to make it a unit, let it be called, or register the method that reads it with --method",
    ),
    ModuleRule(
        code="AS222",
        severity="note",
        reason=_not_called,
        remedy="nothing; to make it a unit, register the method that runs it with --method",
    ),
    ModuleRule(
        code="AS217",
        severity="warning",
        reason=_no_hook,
        remedy="return a tensor, tuple, list, dict or dataclass of tensors",
    ),
    ModuleRule(
        code="AS227",
        severity="warning",
        reason=_exact_type,
        remedy="ask with isinstance, or by an attribute of the class",
    ),
    ModuleRule(
        code="AS225",
        severity="note",
        reason=_late_hook,
        remedy="nothing; to make it a unit, return every tensor that is used later, and do not change results in place",
    ),
    ModuleRule(
        code="AS226",
        severity="note",
        reason=_changes_input,
        remedy="nothing; to make it a unit, compute out of place (x = x + y instead of x += y)",
    ),
)  # fmt: skip
"""Every rule about a single module, in the order in which they are asked."""


def bar(facts: Facts, fqn: str, keys: Keys) -> Finding | None:
    """The first rule that bars a module from being a unit that owns these parameters."""
    for rule in MODULE_RULES:
        reason = rule.reason(facts, fqn, keys)
        if reason is not None:
            return Finding(
                code=rule.code,
                severity=rule.severity,
                where=fqn or "(root)",
                message=reason.message,
                remedy=rule.remedy,
                cause=reason.cause,
            )
    return None
