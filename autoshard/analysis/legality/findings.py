"""Findings of the rules, and how many alike become one diagnostic.

The same rule bars the same module of every block; a user wants to read it once. Findings are alike if they have one
code and one text apart from the numbers inside FQNs.
"""

import re
from collections.abc import Iterable

from autoshard.errors import Diagnostic

_PATH = re.compile(r"\w+(?:\.\w+)+")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def pattern(text: str) -> str:
    """The text with ``*`` for every number that is a part of an FQN.

    Examples:
        >>> pattern("layers.3.attn.out_proj is read 2 times by layers.3.attn")
        'layers.*.attn.out_proj is read 2 times by layers.*.attn'
    """
    return _PATH.sub(lambda found: _INDEX.sub("*", found[0]), text)


def condense(findings: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """One diagnostic for all that are alike: the first of them, with the number and the pattern of the others.

    Order: errors, warnings, notes; within a severity by code, then as found.
    """
    alike: dict[tuple[str, str, str, str], list[Diagnostic]] = {}
    for found in findings:
        key = (found.code, found.severity, pattern(found.where), pattern(found.message))
        alike.setdefault(key, []).append(found)
    condensed = [_merged(group, key[2]) for key, group in alike.items()]
    ranks = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(condensed, key=lambda found: (ranks[found.severity], found.code)))


def _merged(group: list[Diagnostic], where: str) -> Diagnostic:
    first = group[0]
    places = len({found.where for found in group})
    if places == 1:
        return first
    return Diagnostic(
        code=first.code,
        severity=first.severity,
        where=first.where,
        message=f"{first.message} (and {places - 1} more alike: {where})",
        remedy=first.remedy,
    )
