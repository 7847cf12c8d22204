"""Findings of the rules and of the checks that run a model, and how many alike become one diagnostic.

The same rule bars the same module of every block; a user wants to read it once. Findings are alike if they have one
code, one severity, and one cause: the message, unless whoever found it names another.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.errors import Diagnostic, Severity

SHOWN = 3
"""Patterns of further places that a diagnostic names."""

_PATH = re.compile(r"\w+(?:\.\w+)+")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one unit, module or parameter.

    Attributes:
        code: of the diagnostic.
        severity: of the diagnostic.
        where: FQN of the module or parameter, ``(root)`` for the root.
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


def pattern(text: str) -> str:
    """The text with ``*`` for every number that is a part of an FQN.

    Examples:
        >>> pattern("layers.3.attn.out_proj is read 2 times by layers.3.attn")
        'layers.*.attn.out_proj is read 2 times by layers.*.attn'
    """
    return _PATH.sub(lambda found: _INDEX.sub("*", found[0]), text)


def condense(findings: Iterable[Finding]) -> tuple[Diagnostic, ...]:
    """One diagnostic for all that are alike: the outermost of them, with the number and the patterns of the others.

    Order: errors, warnings, notes; within a severity by code, then as found.
    """
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for found in findings:
        cause = pattern(found.cause or found.message)
        alike.setdefault((found.code, found.severity, cause), []).append(found)
    ranks = {"error": 0, "warning": 1, "note": 2}
    merged = [_merged(group) for group in alike.values()]
    return tuple(sorted(merged, key=lambda found: (ranks[found.severity], found.code)))


def _merged(group: list[Finding]) -> Diagnostic:
    # The outermost place stands for all: what bars it bars what lies inside.
    first = min(group, key=lambda found: found.where.count("."))
    others = list(dict.fromkeys(found.where for found in group if found.where != first.where))
    message = first.message
    if others:
        patterns = list(dict.fromkeys(map(pattern, others)))
        named = ", ".join(patterns[:SHOWN]) + (", …" if len(patterns) > SHOWN else "")
        message += f" (and {len(others)} more alike: {named})"
    return Diagnostic(code=first.code, severity=first.severity, where=first.where, message=message, remedy=first.remedy)
