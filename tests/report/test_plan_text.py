"""A plan as text: the first line says what matters, and like units are one row."""

from typing import Any

import pytest

from autoshard.errors import Diagnostic
from autoshard.plan import Alternative, Optimal
from autoshard.report import (
    Table,
    alternatives_table,
    format_diagnostics,
    format_plan,
    format_table,
    format_verdict,
    memory_table,
    units_table,
)
from tests.plans import GIB, deep_plan, full_plan, small_plan, unit

PLANS = {"small": small_plan(), "full": full_plan(), "deep": deep_plan()}


@pytest.mark.parametrize("name", PLANS)
def test_text_of_a_plan(name: str, golden) -> None:
    golden(f"report/{name}.txt", format_plan(PLANS[name]) + "\n")


def test_text_in_detail(golden) -> None:
    golden("report/full_detail.txt", format_plan(PLANS["full"], detail=True) + "\n")


def test_the_first_line_is_the_verdict() -> None:
    first = format_plan(deep_plan()).splitlines()[0]
    assert first == format_verdict(deep_plan())
    for part in ("cpu × 2", "assumed: precision", "no block recomputes", "soundness: rules", "optimal: heuristic"):
        assert part in first


def test_the_verdict_tells_recompute_assumptions_and_a_plan_that_does_not_fit() -> None:
    assert "1 block recomputes" in format_verdict(small_plan(recompute=("layers.0",)))
    assert "2 blocks recompute" in format_verdict(full_plan())
    provenance = small_plan().provenance
    given = small_plan(provenance=type(provenance)(**{**_fields(provenance), "assumed": ()}))
    assert "assumed" not in format_verdict(given)
    assert "assumed, because" not in format_plan(given)
    projection = small_plan().projection
    tight = small_plan(projection=type(projection)(**{**_fields(projection), "allowed_bytes": 104728}))
    assert "DOES NOT FIT" in format_verdict(tight)
    assert ("missing", "1 B", "0.0 %") in memory_table(tight).rows


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_126_equal_blocks_are_one_row() -> None:
    rows = units_table(deep_plan()).rows
    assert len(rows) == 5
    assert rows[1] == ("model.layers.{0..125}", "126", "1", "9", "3.00 GiB", "378 GiB", "reshard")
    # 1 + 126 * 9 + 2 parameters; 2 + 126 * 3 + 2 GiB.
    assert rows[-1] == ("all", "129", "130", "1137", "", "382 GiB", "")


@pytest.mark.parametrize(
    "other",
    [
        {"num_params": 10},
        {"num_bytes": 5009},
        {"reshard": False},
        {"shard_dims": {"layers.1.weight": 1}},
    ],
)
def test_units_with_other_decisions_are_rows_of_their_own(other: dict[str, Any]) -> None:
    like = {"num_params": 9, "num_bytes": 5003}
    units = (*(unit(f"layers.{i}", **{**like, **(other if i == 1 else {})}) for i in range(4)), unit(""))
    patterns = [row[0] for row in units_table(small_plan(units=units)).rows]
    assert patterns == ["layers.{0,2..3}", "layers.1", "(root)", "all"]


def test_rows_stand_in_the_order_of_application() -> None:
    names = ("z", "layers.0.b", "layers.0.a", "layers.0", "layers.1.b", "layers.1.a", "layers.1", "a")
    units = (*(unit(name) for name in names), unit(""))
    patterns = [row[0] for row in units_table(small_plan(units=units)).rows]
    assert patterns == ["z", "layers.{0..1}.b", "layers.{0..1}.a", "layers.{0..1}", "a", "(root)", "all"]


def test_memory_by_kind_the_largest_first() -> None:
    rows = memory_table(small_plan()).rows
    assert [row[0] for row in rows] == [
        "activations",
        "optimizer",
        "parameters",
        "gradients",
        "projected peak",
        "free",
        "allowed",
        "between steps",
    ]
    assert rows[0][1] == "48.8 KiB"


def test_bytes_of_no_kind_are_told() -> None:
    projection = small_plan().projection
    short = type(projection)(**{**_fields(projection), "by_kind": {"sharded_params": 104700}})
    assert memory_table(small_plan(projection=short)).rows[:2] == (
        ("sharded params", "102 KiB", "0.0 %"),
        ("not attributed", "29 B", "0.0 %"),
    )


def test_alternatives_stand_beside_this_plan() -> None:
    rows = alternatives_table(small_plan()).rows
    assert [row[:3] for row in rows] == [
        ("this plan", "fits", "5"),
        ("root only", "does not fit", "1"),
        ("by class names", "fits", "4"),
        ("by size", "not legal", "3"),
    ]
    assert rows[3][3:] == ("–", "–", "AS205 embed")


def test_reasons_are_folded() -> None:
    reasons = (*(f"AS205 h.{i}.wte" for i in range(50)), "AS207 (root)")
    other = Alternative(name="by size", verdict="not legal", num_units=3, reasons=reasons)
    assert alternatives_table(small_plan(alternatives=(other,))).rows[1][5] == "AS205 h.{0..49}.wte; AS207 (root)"


@pytest.mark.parametrize(
    ("optimal", "words"),
    [
        (Optimal(status="proved", bound_ns=7, gap=0.0, space="cuts"), "proved: no plan is faster"),
        (Optimal(status="bounded", bound_ns=10**6, gap=0.0234, space="cuts"), "at most 2.34 % slower"),
        (Optimal(status="heuristic", bound_ns=0, gap=-1.0, space="cuts"), "no bound was computed"),
    ],
)
def test_what_is_known_about_better_plans(optimal: Optimal, words: str) -> None:
    text = " ".join(format_plan(small_plan(optimal=optimal)).split())
    assert words in text
    assert "within: cuts" in text


def test_notes_are_counted_and_shown_on_demand() -> None:
    notes = tuple(
        Diagnostic(code="AS204", severity="note", where=f"h.{i}", message="has no forward") for i in range(12)
    )
    text = format_diagnostics(notes)
    assert "notes: AS204 × 12" in text
    assert "has no forward" not in text
    assert "AS204 note: h.{0..11} (12 places): has no forward" in format_diagnostics(notes, detail=True)


def test_the_gravest_come_first_and_repetition_is_cut() -> None:
    found = [Diagnostic(code="AS201", severity="warning", where="x", message=f"number {i}") for i in range(9)]
    found.append(Diagnostic(code="AS209", severity="error", where="y", message="bad", remedy="mend it"))
    lines = format_diagnostics(tuple(found)).splitlines()
    assert lines[1:3] == ["  AS209 error: y: bad", "    remedy: mend it"]
    assert "  and 4 more of AS201" in lines
    assert "more of" not in format_diagnostics(tuple(found), detail=True)


def test_no_diagnostics() -> None:
    assert format_diagnostics(()) == "diagnostics: none"


def test_a_table_without_rows() -> None:
    assert format_table(Table(title="units", headers=("a",), rows=())) == "units: none"


def test_text_that_looks_like_a_number_is_not_changed() -> None:
    table = Table(title="t", headers=("unit",), rows=(("1e3",), ("007",), ("0.50",)))
    assert format_table(table).splitlines()[3:] == ["1e3", "007", "0.50"]


def test_sizes_of_a_large_plan() -> None:
    assert deep_plan().units[0].num_bytes == 2 * GIB
