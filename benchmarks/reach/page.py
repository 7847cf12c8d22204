"""The figures of the sweep as they stand in the README and in docs/explanation/reach.md, made from the kept results."""

from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.reach.architectures import FULL_SIZE, peers
from benchmarks.reach.others import OTHERS

BEGIN, END = "<!-- figures of make bench-reach: begin -->", "<!-- end -->"
COMMAND = "make bench-reach"

Row = dict[str, Any]


def figures(rows: list[Row], trained: list[Row]) -> str:
    """The table of the page.

    Args:
        rows: the kept results of the sweep.
        trained: the kept results of the training.
    """
    known = peers()
    outcomes = Counter(each["accelerate"] for each in known.values())
    small_root = sum(each["transformers"] == "root at most half" for each in known.values())
    ours = [row for row in rows if row["type"] in known]
    counts = Counter(row["outcome"] for row in ours)
    good = counts["sound"] + counts["refused"]
    others = [row for row in rows if row["type"] in OTHERS]
    reached = sum(row["outcome"] == "sound" for row in others)
    equal = sum(row["outcome"] == "equal" for row in trained)
    deep = sum(row.get("depth") == "full" for row in ours)
    lines = [
        f"| `{COMMAND}`, transformers 5.24 | run | sound plan | rightly refused |",
        "| --- | --- | --- | --- |",
        f"| **autoshard** | {len(ours)} of {len(known)} | {_share(counts['sound'], len(ours))} | {counts['refused']} "
        f"({_share(good, len(ours))} together) |",
        f"| accelerate 1.15, default classes | {len(known)} | {_share(outcomes['sound'], len(known))} | 0 |",
        f"| transformers' own plan | {len(known)} | at most {_share(small_root, len(known))} | 0 |",
        "",
        f"{deep} of the architectures run kept their whole depth ({FULL_SIZE} do in a full run). Models of other kinds "
        f"and libraries: {reached} of {len(others)} sound. Trained for three steps on two ranks "
        f"(`make bench-reach-train`): {equal} of {len(trained)} with the losses of one process.",
    ]
    return "\n".join(lines)


def sentence(rows: list[Row]) -> str:
    """The README's line."""
    known = peers()
    sound = sum(row["outcome"] == "sound" for row in rows if row["type"] in known)
    total = sum(row["type"] in known for row in rows)
    accelerate = sum(each["accelerate"] == "sound" for each in known.values())
    small_root = sum(each["transformers"] == "root at most half" for each in known.values())
    texts = "" if total == len(known) else ", mostly causal language models"
    return (
        f"Of {total} transformers architectures run so far{texts} (`{COMMAND}`; {len(known)} build from a default "
        f"configuration) {_share(sound, total)} get a sound plan, rules and dry run passed; accelerate's default "
        f"classes give {100 * accelerate / len(known):.1f} % of the {len(known)} one, transformers' own plan at most "
        f"{100 * small_root / len(known):.1f} % ([reach](docs/explanation/reach.md))."
    )


def _share(count: int, total: int) -> str:
    return f"{count} ({100 * count / max(total, 1):.1f} %)"


def rewritten(text: str, content: str) -> str:
    """A page with the figures between its two marks exchanged."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no marks {BEGIN} and {END}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def write(root: Path, rows: list[Row], trained: list[Row]) -> None:
    """Bring the README and the page up to the kept results."""
    for place, content in (("README.md", sentence(rows)), ("docs/explanation/reach.md", figures(rows, trained))):
        path = root / place
        path.write_text(rewritten(path.read_text(), content))
