"""The diagnostics of a plan, for reading: what asks for attention in full, what only tells as a count."""

from collections import Counter

from autoshard.errors import Diagnostic
from autoshard.report.folding import fold_names

SHOWN_BY_CODE = 5
"""Rows for one code unless all are asked for."""

_RANK = {"error": 0, "warning": 1, "note": 2}


def format_diagnostics(diagnostics: tuple[Diagnostic, ...], *, detail: bool = False) -> str:
    """Text of diagnostics, the gravest first.

    Args:
        diagnostics: as they stand in a plan.
        detail: show notes too, and every row of each code.
    """
    shown = [found for found in diagnostics if detail or found.severity != "note"]
    notes = Counter(found.code for found in diagnostics if found.severity == "note")
    lines = [f"diagnostics ({len(diagnostics)})" if diagnostics else "diagnostics: none"]
    by_code: dict[tuple[int, str], list[str]] = {}
    for line, first in _folded(shown):
        by_code.setdefault((_RANK[first.severity], first.code), []).append(line)
    for (_, code), rows in sorted(by_code.items()):
        kept = rows if detail else rows[:SHOWN_BY_CODE]
        lines += [f"  {row}" for row in kept]
        if len(kept) < len(rows):
            lines.append(f"  and {len(rows) - len(kept)} more of {code}")
    if notes and not detail:
        counted = ", ".join(f"{code} × {num}" if num > 1 else code for code, num in sorted(notes.items()))
        lines.append(f"  notes: {counted}")
    if by_code or notes:
        lines.append("  `autoshard explain CODE` tells the whole story of a code")
    return "\n".join(lines)


def _folded(diagnostics: list[Diagnostic]) -> list[tuple[str, Diagnostic]]:
    """Findings that say the same of several places as one line."""
    alike: dict[tuple[str, str, str, str], list[Diagnostic]] = {}
    for found in diagnostics:
        alike.setdefault((found.code, found.severity, found.message, found.remedy), []).append(found)
    lines = []
    for same in alike.values():
        for pattern, members in fold_names([(found.where,) for found in same]):
            first = same[members[0]]
            places = f" ({len(members)} places)" if len(members) > 1 else ""
            remedy = f"\n    remedy: {first.remedy}" if first.remedy else ""
            lines.append((f"{first.code} {first.severity}: {pattern}{places}: {first.message}{remedy}", first))
    return lines
