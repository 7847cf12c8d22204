"""Findings of the checks that run a model, and how many alike become one diagnostic."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.errors import Diagnostic, Severity

SHOWN = 3
"""Further places that a diagnostic names."""

_RANKS = {"error": 0, "warning": 1, "note": 2}
_INDEX = re.compile(r"(?<=[.\[])\d+\b")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one unit, module or parameter.

    Attributes:
        code: of the diagnostic.
        severity: of the diagnostic.
        where: FQN, ``(root)`` for the root.
        message: what was found.
        remedy: what to do.
        cause: findings of one code and one cause become one diagnostic; empty for the message.
    """

    code: str
    severity: Severity
    where: str
    message: str
    remedy: str = ""
    cause: str = ""


def condense(findings: Iterable[Finding]) -> tuple[Diagnostic, ...]:
    """One diagnostic for all that are alike, the first found with the number of the others; errors first."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for found in findings:
        cause = _INDEX.sub("*", found.cause or found.message)
        alike.setdefault((found.code, found.severity, cause), []).append(found)
    merged = [_merged(group) for group in alike.values()]
    return tuple(sorted(merged, key=lambda found: (_RANKS[found.severity], found.code)))


def _merged(group: list[Finding]) -> Diagnostic:
    first = group[0]
    others = list(dict.fromkeys(found.where for found in group if found.where != first.where))
    message = first.message
    if others:
        named = ", ".join(others[:SHOWN]) + (", …" if len(others) > SHOWN else "")
        message += f" (and {len(others)} more alike: {named})"
    return Diagnostic(code=first.code, severity=first.severity, where=first.where, message=message, remedy=first.remedy)
