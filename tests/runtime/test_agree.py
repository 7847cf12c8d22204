"""Ranks that do not hold the same thing all say so, and none of them waits for another."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from autoshard.errors import ApplyError, PlanFormatError, PlanMismatchError, RankDisagreementError
from autoshard.plan import Decisions
from autoshard.runtime import apply_plan
from tests.runtime.models import Stack
from tests.runtime.plans import decide
from tests.runtime.ranks import Outcome, try_ranks

pytestmark = pytest.mark.slow

BLOCKS = [((f"layers.{i}",), True) for i in range(3)]
ROOT = ((("",), False),)


class Frozen(Stack):
    """One parameter does not train, two layers deep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].norm.bias.requires_grad = False


class Reordered(Stack):
    """The same names, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["enter"] = self._modules.pop("enter")


def _apply(
    rank: int, world: int, plans: list[Decisions], builds: list[type[nn.Module]], with_mesh: bool = False
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")) if with_mesh else None
    model = builds[rank % len(builds)]()
    try:
        apply_plan(model, plans[rank % len(plans)], mesh)
    finally:
        changed = [module for module in model.modules() if isinstance(module, FSDPModule)]
        assert not changed, "the model was changed"


def _errors(outcomes: list[Outcome], kind: type[Exception]) -> list[Exception]:
    for one in outcomes:
        assert isinstance(one.error, kind), f"{one.error!r}\n{one.trace}"
    return [one.error for one in outcomes]


def test_another_plan_on_one_rank() -> None:
    plan, other = decide(Stack(), [*BLOCKS, *ROOT]), decide(Stack(), [*BLOCKS[:2], *ROOT])
    for error in _errors(try_ranks(_apply, [plan, plan, other], [Stack], world=3, seconds=30), RankDisagreementError):
        assert error.what == "plan"
        assert error.groups == ((0, 1), (2,))
        assert error.difference == ("units: 4 of them", "units: 3 of them")
        assert "ranks 0, 1: units: 4 of them; rank 2: units: 3 of them" in str(error)


def test_another_order_of_parameters_on_one_rank() -> None:
    plan = decide(Stack(), [*BLOCKS, *ROOT])
    for error in _errors(try_ranks(_apply, [plan], [Stack, Reordered], seconds=30), RankDisagreementError):
        assert error.what == "model"
        assert error.groups == ((0,), (1,))
        here, there = ([key for key, _ in model.named_parameters()] for model in (Stack(), Reordered()))
        first = next(index for index, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1])
        assert [text.split()[1] for text in error.difference] == [here[first], there[first]]


def test_the_first_difference_of_models_and_of_plans_is_told() -> None:
    plan = decide(Stack(), [*BLOCKS, *ROOT])
    for error in _errors(try_ranks(_apply, [plan], [Stack, Frozen], seconds=30), RankDisagreementError):
        key = "parameter layers.2.norm.bias float32 [14]"
        assert error.difference == (f"{key} trained", f"{key} frozen")
    kept = decide(Stack(), [*BLOCKS[:2], (("layers.2",), False), *ROOT])
    for error in _errors(try_ranks(_apply, [plan, kept], [Stack], seconds=30), RankDisagreementError):
        assert error.difference == ("units[2].reshard: true", "units[2].reshard: false")


def test_over_both_axes_of_a_given_mesh() -> None:
    plan, other = decide(Stack(), [*BLOCKS, *ROOT], replicas=2), decide(Stack(), [*ROOT], replicas=2)
    outcomes = try_ranks(_apply, [plan, plan, plan, other], [Stack], True, world=4, seconds=30)
    for error in _errors(outcomes, RankDisagreementError):
        assert error.groups == ((0, 1, 2), (3,))
        assert error.difference == ("units: 4 of them", "units: 1 of them")


def _sharded_on_one_rank(rank: int, world: int, plan: Decisions) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Stack()
    if rank == 1:
        fully_shard(model.head)
    apply_plan(model, plan)


def test_a_mismatch_on_one_rank_ends_all() -> None:
    plan = decide(Stack(), [*BLOCKS, *ROOT])
    outcomes = try_ranks(_sharded_on_one_rank, plan, seconds=30)
    here, there = _errors(outcomes, PlanMismatchError)
    assert here.differences[0].where == "head (on rank 1)"
    assert there.differences[0].where == "head"


def test_an_error_on_one_rank_ends_all() -> None:
    plan = decide(Stack(), [*BLOCKS, *ROOT])
    refused = decide(Stack(), [*BLOCKS, *ROOT], offload="host")
    outcomes = try_ranks(_apply, [plan, refused], [Stack], seconds=30)
    assert isinstance(outcomes[0].error, ApplyError)
    assert "rank 1 could not go on" in str(outcomes[0].error)
    assert isinstance(outcomes[1].error, PlanFormatError)


def _weights_on_one_rank(rank: int, world: int, plan: Decisions) -> str:
    with torch.device("cpu" if rank == 0 else "meta"), warnings.catch_warnings():
        model = Stack()
    apply_plan(model, plan)
    return str(model.gain.device)


def test_weights_on_one_rank_and_meta_on_the_others_agree() -> None:
    outcomes = try_ranks(_weights_on_one_rank, decide(Stack(), [*BLOCKS, *ROOT]), seconds=30)
    assert [one.value for one in outcomes] == ["cpu", "meta"]
