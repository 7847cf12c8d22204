"""The counts of the sweep, beside those of two peers on the same architectures, and every failure with its reason."""

from collections import Counter
from typing import Any

from benchmarks.reach.architectures import peers

GOOD = ("sound", "refused")
"""Outcomes that need no repair."""
SHOWN = 400
"""Characters of a reason."""

Row = dict[str, Any]


def summary(rows: list[Row], title: str) -> str:
    """Counts and every failure with its reason.

    Args:
        rows: one for each model that builds.
        title: what was run.
    """
    counts = Counter(row["outcome"] for row in rows)
    stages = Counter(row["stage"] for row in rows if row["outcome"] == "failed")
    good = sum(counts[outcome] for outcome in GOOD)
    total = max(len(rows), 1)
    in_fp32 = sum(row["outcome"] == "sound" and row.get("precision") == "fp32" for row in rows)
    indivisible = sum(row["outcome"] == "sound" and bool(row.get("reason")) for row in rows)
    lines = [
        "",
        f"{title}: {len(rows)}",
        f"sound              {counts['sound']:4}  {counts['sound'] / total:6.1%}   "
        f"({indivisible} of them with more than a quarter in a root that cannot be divided; {in_fp32} in fp32, which "
        "do not run with bf16 parameters)",
        f"rightly refused    {counts['refused']:4}  {counts['refused'] / total:6.1%}   together {good / total:.1%}",
        f"too much in root   {counts['root']:4}",
        f"failed             {counts['failed']:4}  {', '.join(f'{name} {n}' for name, n in stages.most_common())}",
        f"not built          {counts['not built']:4}",
        f"unhandled          {sum(not row.get('handled', True) for row in rows if row['outcome'] != 'not built'):4}",
    ]
    for row in sorted(rows, key=lambda row: (row["outcome"], row["stage"], row["type"])):
        if row["outcome"] != "sound" or row.get("reason"):
            lines.append(f"{row['outcome']:<8} {row['stage']:<12} {row['type']} {row['class']}: {_reason(row)}")
    return "\n".join(lines)


def _reason(row: Row) -> str:
    users = [place for place in row.get("tail", ()) if " " in place and "/" not in place.split(":")[0]]
    place = f" [{'; '.join(users)}]" if users else ""
    return " ".join(row["reason"][:SHOWN].split()) + place


def peers_summary() -> str:
    """The two peers on the architectures that build by default."""
    known = peers().values()
    accelerate = Counter(row["accelerate"] for row in known)
    small_root = sum(row["transformers"] == "root at most half" for row in known)
    failures = ", ".join(f"{name} {n}" for name, n in accelerate.most_common() if name != "sound")
    return "\n".join(
        (
            f"accelerate's default classes   sound {accelerate['sound']:4}  {accelerate['sound'] / len(known):6.1%}   "
            f"({failures})",
            f"transformers' own plan       at most {small_root:4}  {small_root / len(known):6.1%}   "
            "(root at most half; not tried further)",
        )
    )
