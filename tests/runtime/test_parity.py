"""Training on several ranks gives the losses and parameters of the reference, whatever the plan does."""

import pytest

from autoshard.plan import Precision
from tests.runtime.models import Branches, Scaled, Stack, TiedEnds, TiedLM
from tests.runtime.plans import decide
from tests.runtime.ranks import note, run_ranks
from tests.runtime.training import Comparison, compare

pytestmark = pytest.mark.slow

BLOCKS = [((f"layers.{i}",), True) for i in range(3)]
ROOT = ((("",), False),)


def _compare(rank: int, world: int, names: list[str]) -> dict[str, Comparison]:
    found = {}
    for name in names:
        note(name)
        build, plan = PLANS[name]
        found[name] = compare(rank, world, build, plan(build()))
    return found


PLANS = {
    "root only": (Stack, lambda m: decide(m, [*ROOT])),
    "plain stack": (Stack, lambda m: decide(m, [*BLOCKS, *ROOT])),
    "root reshards": (Stack, lambda m: decide(m, [*BLOCKS, (("",), True)])),
    "no unit reshards": (Stack, lambda m: decide(m, [((f"layers.{i}",), False) for i in range(3)] + [*ROOT])),
    "list unit at the end": (
        Stack,
        lambda m: decide(m, [(("enter",), True), *BLOCKS, (("norm", "head"), False), *ROOT]),
    ),
    "nested units": (
        Stack,
        lambda m: decide(
            m, [(("layers.0.expand",), True), (("layers.0.shrink",), False), *BLOCKS, (("head",), True), *ROOT]
        ),
    ),
    "two blocks in one unit": (Stack, lambda m: decide(m, [(("layers.0", "layers.1"), True), BLOCKS[2], *ROOT])),
    "other shard dim": (
        Stack,
        lambda m: decide(m, [*BLOCKS, *ROOT], shard_dims={"layers.0.expand.weight": 1, "head.weight": 1}),
    ),
    "tied in the root": (TiedLM, lambda m: decide(m, [*BLOCKS, *ROOT])),
    "tied in a list unit": (TiedEnds, lambda m: decide(m, [(("enter",), True), (("first", "second"), True), *ROOT])),
    "all of a tied model in the root": (TiedLM, lambda m: decide(m, [*ROOT])),
    "other entry": (Stack, lambda m: decide(m, [*BLOCKS, *ROOT], entry="training_step")),
    "ranks use different parameters": (Branches, lambda m: decide(m, [*ROOT], reduce_unused=True)),
    "recompute": (
        Stack,
        lambda m: decide(m, [*BLOCKS, *ROOT], recompute=("enter", "layers.0", "layers.1.expand", "layers.2")),
    ),
    "replicated": (Scaled, lambda m: decide(m, [(("body.0",), True), *ROOT], replicated=("scale",))),
    "three ranks": (
        Stack,
        lambda m: decide(m, [*BLOCKS, (("norm", "head"), False), *ROOT], shards=3),
    ),
    "two axes": (Stack, lambda m: decide(m, [*BLOCKS, *ROOT], replicas=2)),
    "bf16": (
        Stack,
        lambda m: decide(m, [*BLOCKS, *ROOT], precision=Precision(param="bfloat16", reduce="float32")),
    ),
}


WORLDS = {"two axes": 4, "three ranks": 3}
"""Ranks that a plan needs where it is not two. Three divide no first dim of the model."""


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Comparison]]:
    """All plans one after the other on the same two ranks; a hang is told with the name of its plan."""
    return run_ranks(_compare, [name for name in PLANS if name not in WORLDS], seconds=100)


@pytest.mark.parametrize("name", [name for name in PLANS if name not in {*WORLDS, "bf16"}])
def test_losses_and_parameters_equal_the_reference(name: str, on_two_ranks: list[dict[str, Comparison]]) -> None:
    for found in on_two_ranks:
        _require_equal(found[name])


@pytest.mark.parametrize("name", WORLDS)
def test_on_more_ranks(name: str) -> None:
    for found in run_ranks(_compare, [name], world=WORLDS[name]):
        _require_equal(found[name])


def test_bf16_is_near_the_reference_and_not_it(on_two_ranks: list[dict[str, Comparison]]) -> None:
    for found in on_two_ranks:
        assert 1e-5 < found["bf16"].loss < 0.1


def _require_equal(found: Comparison) -> None:
    assert found.learned
    assert found.loss <= 1e-5
    assert found.param <= 1e-4
    assert found.keys
