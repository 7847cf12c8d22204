"""Real steps on two ranks: equal to one process under a right plan; what is wrong or hangs is told."""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.errors import Diagnostic, ModelLoadError
from autoshard.plan import Decisions, Precision
from autoshard.runtime.trial import Case, train_beside_reference
from tests.runtime import faulty
from tests.runtime.plans import decide

pytestmark = pytest.mark.slow

LAYERS = [((f"layers.{i}",), True) for i in range(3)]
ROOT = [(("",), False)]
FORK = [(("left",), True), (("right",), True), *ROOT]


def load(name: str) -> Case:
    """Builds on each rank; ranks draw different values, of which the first rank's count."""
    torch.manual_seed(os.getpid())
    model: nn.Module = getattr(faulty, name)()
    return Case(model=model, pairs=(((torch.randn(4, faulty.WIDTH),), {}),), loss=loss_of)


def load_fork(model: type[nn.Module] = faulty.Fork) -> Case:
    x = torch.randn(4, faulty.WIDTH)
    return Case(model=model(), pairs=(((x, True), {}), ((x, False), {})), loss=loss_of)


def load_and_die() -> Case:
    os._exit(3)


def load_and_refuse() -> Case:
    raise ModelLoadError("model.py", "it is not there", "put it there")


def loss_of(outputs: Any) -> torch.Tensor:
    return (outputs.h if isinstance(outputs, faulty.Opaque) else outputs).float().square().mean()


def _try(load: Callable[[], Case], plan: Decisions, steps: int = 2, **options: Any) -> tuple[Diagnostic, ...]:
    return train_beside_reference(load, plan, steps, **options)


@pytest.mark.parametrize(
    ("name", "units", "other"),
    [
        ("Stack", [*LAYERS, (("norm", "head"), True), *ROOT], {}),
        ("Stack", [*LAYERS, *ROOT], {"shards": 3, "shard_dims": {"layers.0.up.weight": 1}}),
        (
            "Stack",
            [*LAYERS, *ROOT],
            {"shards": 8, "replicas": 4, "precision": Precision(param="bfloat16"), "recompute": ("layers.1",)},
        ),
        ("Dropping", [(("first",), True), *ROOT], {}),
        ("Empty", [(("linear",), True), *ROOT], {"replicated": ("nothing",)}),
    ],
)
def test_a_right_plan_trains_as_one_process(name: str, units: list[Any], other: dict[str, Any]) -> None:
    assert _try(functools.partial(load, name), decide(getattr(faulty, name)(), units, **other)) == ()


@pytest.mark.parametrize(
    ("name", "units", "code", "where"),
    [
        ("OpaqueRoot", ROOT, "AS409", "linear.weight"),
        ("Alias", [(("linear",), True), *ROOT], "AS402", "DTensor"),
        ("Remembering", [(("linear",), True), *ROOT], "AS409", "linear.weight"),
        ("Passed", [(("first",), True), (("second",), True), *ROOT], "AS402", "setStorage"),
        ("DirectCall", [(("first",), True), (("second",), True), *ROOT], "AS402", "first"),
    ],
)
def test_what_a_plan_breaks_is_found(name: str, units: list[Any], code: str, where: str) -> None:
    found = _try(functools.partial(load, name), decide(getattr(faulty, name)(), units), steps=3)
    assert (found[0].code, found[0].severity) == (code, "error"), found
    assert any(where in str(each) for each in found), found


def test_a_model_that_does_not_train_is_no_error() -> None:
    (found,) = _try(functools.partial(load, "Diverging"), decide(faulty.Diverging(), ROOT))
    assert (found.code, found.severity) == ("AS409", "warning")
    assert "nan" in found.message


def test_low_precision_has_its_own_tolerance() -> None:
    plan = decide(faulty.two_dtypes(), [*LAYERS, *ROOT])
    assert _try(functools.partial(load, "two_dtypes"), plan, steps=3) == ()


def test_ranks_may_take_different_ways_where_the_plan_allows_it() -> None:
    assert _try(load_fork, decide(faulty.Fork(), ROOT, reduce_unused=True), steps=3) == ()


def test_a_hang_is_ended_and_names_the_unit() -> None:
    start = time.monotonic()
    (found,) = _try(functools.partial(load, "Waiting"), decide(faulty.Waiting(), FORK), silence_s=8)
    assert time.monotonic() - start < 45
    assert (found.code, found.where) == ("AS410", "right")
    assert "hang" in found.message
    assert "rank 1: step 1: forward of right" in found.message


def test_ranks_that_run_other_units_end_with_a_finding() -> None:
    plan = decide(faulty.UnevenFork(), FORK)
    found = _try(functools.partial(load_fork, faulty.UnevenFork), plan, silence_s=8)
    assert {each.code for each in found} <= {"AS402", "AS410"}
    assert found


def test_a_rank_that_dies_is_told() -> None:
    (found,) = _try(load_and_die, decide(faulty.Stack(), ROOT))
    assert (found.code, "building the model" in found.message) == ("AS410", True)


def test_what_loading_refuses_is_raised() -> None:
    with pytest.raises(ModelLoadError, match="it is not there"):
        _try(load_and_refuse, decide(faulty.Stack(), ROOT))
