"""The whole error tree, and the diagnostic that every stage speaks in.

An error carries data in its fields and makes its message from them: what failed, where, by how much, what to do.
Each class has the exit code that the command line ends with. A ``Diagnostic`` is a finding that does not stop the
work by itself: it stands in the plan and is explained by ``autoshard explain CODE``.
"""

from typing import ClassVar, Literal

import msgspec

from autoshard.sizes import format_bytes

Severity = Literal["error", "warning", "note"]


class Diagnostic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finding of a stage.

    Attributes:
        code: ``AS`` and three digits: 1xx capture, 2xx legality, 3xx planning, 4xx run time.
        severity: ``error`` refuses, ``warning`` asks for attention, ``note`` tells.
        where: the FQN of a module or parameter, ``(root)``, or a field; never empty.
        message: what was found, one sentence.
        remedy: what to do about it, one sentence; empty where nothing needs doing.
    """

    code: str
    severity: Severity
    where: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        tail = f" — {self.remedy}" if self.remedy else ""
        return f"{self.code} {self.severity}: {self.where}: {self.message}{tail}"


class AutoshardError(Exception):
    """The root of all errors that autoshard raises on purpose."""

    exit_code: ClassVar[int] = 1


class RequestError(AutoshardError, ValueError):
    """What was asked is not a question: a bad option, size or name.

    Attributes:
        field: the option or field, as the user writes it.
        value: what was given.
        expected: what would have been right.
        remedy: what to do.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, expected: str, remedy: str = "") -> None:
        remedy = remedy or f"correct {field}; `autoshard COMMAND --help` lists what each option takes"
        super().__init__(field, value, expected, remedy)
        self.field, self.value, self.expected, self.remedy = field, value, expected, remedy

    def __str__(self) -> str:
        return f"{self.field}: got {_short(self.value)}, expected {self.expected}\n  remedy: {self.remedy}"


class ModelLoadError(AutoshardError):
    """A model file could not be turned into a model or its inputs.

    Attributes:
        source: the model file as the user named it.
        reason: what went wrong, with the user's own line where there is one.
        remedy: what to do.
        line: line in the user's file, 0 if none.
    """

    exit_code = 2

    def __init__(self, source: str, reason: str, remedy: str, line: int = 0) -> None:
        super().__init__(source, reason, remedy, line)
        self.source, self.reason, self.remedy, self.line = source, reason, remedy, line

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}" if self.line else self.source
        return f"{place}: {self.reason}\n  remedy: {self.remedy}"


class CaptureError(AutoshardError):
    """The training step could not be captured.

    Attributes:
        fqn: module that was running, ``(root)`` for the root or the loss.
        reason: what went wrong.
        remedy: what to do.
    """

    exit_code = 6

    def __init__(self, fqn: str, reason: str, remedy: str) -> None:
        super().__init__(fqn, reason, remedy)
        self.fqn, self.reason, self.remedy = fqn, reason, remedy

    def __str__(self) -> str:
        return f"cannot capture {self.fqn}: {self.reason}\n  remedy: {self.remedy}"


class GraphError(AutoshardError):
    """An invariant of the IR does not hold: a bug of autoshard.

    Attributes:
        violations: every broken invariant.
    """

    exit_code = 1

    def __init__(self, violations: tuple[str, ...]) -> None:
        super().__init__(violations)
        self.violations = violations

    def __str__(self) -> str:
        listed = "\n  ".join(self.violations)
        return f"the captured graph is not consistent (a bug of autoshard, please report it):\n  {listed}"


class PlanningError(AutoshardError):
    """No plan can be given."""

    exit_code = 3


class InfeasibleBudgetError(PlanningError):
    """No plan in the search space fits the allowance.

    Attributes:
        allowed_bytes: what a device may hold.
        smallest_bytes: the least projected peak of any plan that was found.
        bottleneck: FQN of the unit (or name of the op) that makes that peak.
        peak_at: where in the step the peak stands.
        remedies: changes that would do, each with its number.
    """

    def __init__(
        self, allowed_bytes: int, smallest_bytes: int, bottleneck: str, peak_at: str, remedies: tuple[str, ...]
    ) -> None:
        super().__init__(allowed_bytes, smallest_bytes, bottleneck, peak_at, remedies)
        self.allowed_bytes, self.smallest_bytes = allowed_bytes, smallest_bytes
        self.bottleneck, self.peak_at, self.remedies = bottleneck, peak_at, remedies

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the smallest plan exceeds the allowance."""
        return self.smallest_bytes - self.allowed_bytes

    def __str__(self) -> str:
        lines = [
            f"no plan fits: allowed {format_bytes(self.allowed_bytes)} per device, the smallest projected peak is "
            f"{format_bytes(self.smallest_bytes)} ({format_bytes(self.missing_bytes)} missing)",
            f"  peak: {self.peak_at}, made by {self.bottleneck}",
        ]
        lines += [f"  remedy: {remedy}" for remedy in self.remedies]
        return "\n".join(lines)


class NoLegalUnitError(PlanningError):
    """The model cannot be sharded at all under FSDP2's rules.

    Attributes:
        diagnostics: why, one for each module or parameter that forbids it.
    """

    def __init__(self, diagnostics: tuple[Diagnostic, ...]) -> None:
        super().__init__(diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        listed = "\n  ".join(str(d) for d in self.diagnostics)
        return f"this model has no legal plan:\n  {listed}"


class PlanFormatError(AutoshardError, ValueError):
    """A plan file is not a plan.

    Attributes:
        where: JSON path, ``$`` for the whole text, empty if there is no text to read.
        reason: what is wrong there.
        source: the file, empty if the text came from elsewhere.
    """

    exit_code = 4

    def __init__(self, where: str, reason: str, source: str = "") -> None:
        super().__init__(where, reason, source)
        self.where, self.reason, self.source = where, reason, source

    def __str__(self) -> str:
        source = f"{self.source}: " if self.source else ""
        if not self.where:
            return f"{source}{self.reason}\n  remedy: name a file that `autoshard plan -o` or save_plan wrote"
        return f"{source}not a valid plan at {self.where}: {self.reason}"


class PlanVersionError(PlanFormatError):
    """A plan file of a version that this release cannot read.

    Attributes:
        found: the version in the file.
        supported: the versions that can be read.
    """

    def __init__(self, found: int, supported: tuple[int, ...], source: str = "") -> None:
        reason = f"plan version {found} is not supported; this release reads {', '.join(map(str, supported))}"
        super().__init__("$.version", reason, source)
        self.args = (found, supported, source)
        self.found, self.supported = found, supported


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One point in which a model or mesh is not what a plan was made for.

    Attributes:
        where: FQN of the module or parameter, or the field of the plan.
        planned: what the plan says.
        found: what is there.
    """

    where: str
    planned: str
    found: str

    def __str__(self) -> str:
        return f"{self.where}: the plan says {self.planned}, found {self.found}"


class PlanMismatchError(AutoshardError):
    """The plan was made for another model or mesh. Nothing has been changed.

    Attributes:
        differences: every difference, not only the first.
    """

    exit_code = 5

    def __init__(self, differences: tuple[Difference, ...]) -> None:
        super().__init__(differences)
        self.differences = differences

    def __str__(self) -> str:
        shown = [str(d) for d in self.differences[:20]]
        more = len(self.differences) - len(shown)
        listed = "\n  ".join(shown) + (f"\n  and {more} more" if more else "")
        return (
            f"the plan does not match this model ({len(self.differences)} differences; nothing was changed):\n"
            f"  {listed}\n  remedy: make the plan again from this model"
        )


class RankDisagreementError(AutoshardError):
    """Ranks hold different plans or models. Nothing has been changed.

    Attributes:
        what: what differs (``plan`` or ``model``).
        groups: ranks that agree with each other, one tuple for each version.
        difference: the first point in which the versions differ: what each of the first two groups holds there.
    """

    exit_code = 5

    def __init__(
        self, what: str, groups: tuple[tuple[int, ...], ...], difference: tuple[str, str] | None = None
    ) -> None:
        super().__init__(what, groups, difference)
        self.what, self.groups, self.difference = what, groups, difference

    def __str__(self) -> str:
        listed = "; ".join(map(_ranks, self.groups))
        lines = [f"the ranks do not hold the same {self.what}: {listed}"]
        if self.difference is not None:
            held = (f"{_ranks(ranks)}: {what}" for ranks, what in zip(self.groups, self.difference, strict=False))
            lines.append(f"  first difference: {'; '.join(held)}")
        return "\n".join([*lines, f"  remedy: give every rank the same {self.what}"])


class ApplyError(AutoshardError):
    """``fully_shard`` or the check after it failed.

    Attributes:
        modules: FQNs of the unit that was being applied, empty for the whole model.
        phase: ``agree``, ``recompute``, ``compile``, ``shard``, ``methods``, ``flags``, ``confirm`` or ``buffers``.
        reason: what went wrong.
    """

    exit_code = 7

    def __init__(self, modules: tuple[str, ...], phase: str, reason: str) -> None:
        super().__init__(modules, phase, reason)
        self.modules, self.phase, self.reason = modules, phase, reason

    def __str__(self) -> str:
        where = ", ".join(name or "(root)" for name in self.modules) or "the model"
        return f"applying the plan failed at {where} ({self.phase}): {self.reason}"


class VerificationError(AutoshardError):
    """A plan breaks a rule for this model.

    Attributes:
        violations: every finding of severity ``error``.
    """

    exit_code = 8

    def __init__(self, violations: tuple[Diagnostic, ...]) -> None:
        super().__init__(violations)
        self.violations = violations

    def __str__(self) -> str:
        listed = "\n  ".join(str(v) for v in self.violations)
        return f"the plan is not right for this model ({len(self.violations)} violations):\n  {listed}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _short(value: object) -> str:
    """The value on one line of a message, however large it is."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:150]} … {text[-40:]}"
