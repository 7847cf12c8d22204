"""Differences in what two plans do, in words."""

from typing import Any

import pytest

from autoshard.plan import Decisions, decisions_of, diff_plans
from tests.plans import full_plan, small_plan, unit


def words(fields: dict[str, Any]) -> list[str]:
    return [str(difference) for difference in diff_plans(small_plan(), small_plan(**fields))]


def test_equal_plans_have_none_whatever_they_say_to_people() -> None:
    other = small_plan(soundness="assumed", projection=full_plan().projection, alternatives=(), diagnostics=())
    assert diff_plans(small_plan(), other) == ()


@pytest.mark.parametrize("name", ["fingerprint", *Decisions.__struct_fields__])
def test_each_driving_field_is_seen(name: str) -> None:
    other = full_plan() if name != "fingerprint" else small_plan(fingerprint="sha256:" + "0" * 64)
    found = diff_plans(small_plan(), small_plan(**{name: getattr(other, name)}))
    assert found
    assert all(d.where.split(" ")[0].split(".")[0] in (name, "unit") for d in found)


def test_units_are_matched_by_their_modules() -> None:
    base = small_plan().units
    kept = unit("layers.0", num_params=9, num_bytes=5003, reshard=False)
    assert words({"units": (base[0], kept, *base[2:])}) == ["unit layers.0: reshard: true → false"]
    cut = (*base[:2], unit("layers.1.mlp", num_params=4), *base[2:])
    assert words({"units": cut}) == ["unit layers.1.mlp: absent → 4 parameters, reshard true"]
    assert words({"units": base[1:]}) == ["unit embed: 1 parameters, reshard true → absent"]
    assert words({"units": (*base[:3], base[4])}) == ["unit norm, head: 2 parameters, reshard false → absent"]


def test_order_of_the_units_counts() -> None:
    base = small_plan().units
    moved = (base[1], base[0], *base[2:])
    assert words({"units": moved}) == ['order of the units from position 0: ["embed"] → ["layers.0"]']


def test_fields_of_precision_are_told_apart() -> None:
    assert words({"precision": full_plan().precision}) == [
        'precision.param: "same" → "bfloat16"',
        'precision.reduce: "same" → "float32"',
        'precision.output: "same" → "float16"',
        "precision.cast_inputs: true → false",
    ]


def test_decisions_alone_compare_without_fingerprint() -> None:
    other = small_plan(fingerprint="sha256:" + "0" * 64)
    assert diff_plans(decisions_of(small_plan()), other) == ()
    assert [d.where for d in diff_plans(small_plan(), other)] == ["fingerprint"]
