"""What is applied, and what is for people."""

from typing import Any

import pytest

from autoshard.errors import Diagnostic
from autoshard.plan import Decisions, Plan, decisions_of
from tests.plans import deep_plan, full_plan, small_plan

DRIVING = {"version", "fingerprint", *Decisions.__struct_fields__}
FOR_PEOPLE = {"soundness", "optimal", "projection", "alternatives", "diagnostics", "provenance"}


def test_each_field_is_driving_or_for_people() -> None:
    assert set(Plan.__struct_fields__) == DRIVING | FOR_PEOPLE
    assert not DRIVING & FOR_PEOPLE


def test_decisions_are_the_driving_fields() -> None:
    plan = full_plan()
    decisions = decisions_of(plan)
    assert type(decisions) is Decisions
    assert all(getattr(decisions, name) == getattr(plan, name) for name in Decisions.__struct_fields__)


@pytest.mark.parametrize(
    "fields",
    [
        {"soundness": "assumed"},
        {"optimal": full_plan().optimal},
        {"projection": deep_plan().projection, "alternatives": ()},
        {"diagnostics": (Diagnostic(code="AS299", severity="error", where="layers.0", message="x"),)},
        {"provenance": small_plan().provenance, "diagnostics": ()},
    ],
)
def test_fields_for_people_do_not_change_decisions(fields: dict[str, Any]) -> None:
    assert set(fields) <= FOR_PEOPLE
    assert decisions_of(small_plan(**fields)) == decisions_of(small_plan())


def test_sizes_of_the_mesh() -> None:
    assert (full_plan().num_shards, full_plan().num_devices) == (5, 15)
    assert (small_plan().num_shards, small_plan().num_devices) == (2, 2)
