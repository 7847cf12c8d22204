"""The memory of a plan as text and as data, from the plan alone."""

import msgspec

from autoshard.report import format_memory, memory_figures
from tests.plans import small_plan


def test_text(golden) -> None:
    golden("report/memory.txt", format_memory(small_plan()) + "\n")


def test_figures_say_what_the_text_says() -> None:
    figures, projection = memory_figures(small_plan()), small_plan().projection
    assert figures["peak_bytes"] == 104729
    assert [phase["phase"] for phase in figures["phases"]] == ["forward", "backward"]
    assert sum(part["num_bytes"] for part in figures["parts"]) == 104729
    assert [stretch["end_ns"] for stretch in figures["timeline"]] == [433231, 1299709]
    assert figures["not_modelled"] == list(projection.not_modelled)


def test_a_plan_that_knows_no_parts_is_shown_as_well() -> None:
    projection = msgspec.structs.replace(small_plan().projection, phases=(), parts=(), course=())
    assert "each phase: none" in format_memory(small_plan(projection=projection))
