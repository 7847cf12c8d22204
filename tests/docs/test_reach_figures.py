"""The figures of the sweep in README and docs are those of the results that are kept beside it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reach.architectures import peers
from benchmarks.reach.page import BEGIN, figures, rewritten, sentence

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "benchmarks" / "reach"


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (KEPT / name).read_text().splitlines()]


def test_the_figures_are_those_of_the_results() -> None:
    rows, trained = _rows("results.jsonl"), _rows("trained.jsonl")
    for place, content in (("README.md", sentence(rows)), ("docs/explanation/reach.md", figures(rows, trained))):
        text = (ROOT / place).read_text()
        assert rewritten(text, content) == text, f"{place}: run `make bench-reach REACH=--keep`"


def test_the_peers_are_the_ones_that_are_told() -> None:
    """Sums of the table by hand: 574 architectures, of which 238, 38, 47 and 251; 328 and 246."""
    known = list(peers().values())
    outcomes = [each["accelerate"] for each in known]
    names = ("sound", "fails at first forward", "root over half", "fails at prepare")
    assert [outcomes.count(name) for name in names] == [238, 38, 47, 251]
    assert sum(each["transformers"] == "root at most half" for each in known) == 328
    assert len(known) == 574


def test_every_row_that_is_not_sound_has_a_reason() -> None:
    rows = _rows("results.jsonl")
    assert rows
    assert all(row.get("reason") for row in rows if row["outcome"] != "sound")
    assert all(row["soundness"] == "dry-run" for row in rows if row["outcome"] == "sound")
    assert all(row["root_share"] <= 0.25 or row.get("reason") for row in rows if row["outcome"] == "sound")


def test_a_page_without_marks_is_told() -> None:
    with pytest.raises(ValueError, match="no marks"):
        rewritten(f"text {BEGIN} and no end", "figures")
