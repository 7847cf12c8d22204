"""Every difference at once, before anything changes. On a fake process group of two, in this process."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.errors import PlanFormatError, PlanMismatchError, RequestError
from autoshard.plan import Decisions, Method, Precision
from autoshard.runtime import apply_plan
from tests.runtime.models import Block, Scaled, Stack, TiedLM
from tests.runtime.plans import decide

BLOCKS = [((f"layers.{i}",), True) for i in range(3)]
ROOT = ((("",), False),)


@pytest.fixture(autouse=True)
def group_of_two() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _differences(model: nn.Module, plan: Decisions, **options: object) -> dict[str, str]:
    before = [(name, id(param)) for name, param in model.named_parameters()]
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(model, plan, **options)  # type: ignore[arg-type]
    assert [(name, id(param)) for name, param in model.named_parameters()] == before
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    return {one.where: one.found for one in caught.value.differences}


def test_all_names_that_are_missing() -> None:
    plan = decide(
        Stack(), [*BLOCKS, *ROOT], methods=(Method(module="layers.0", method="encode"),), entry="training_steps"
    )
    other = Stack()
    del other.layers[2]
    found = _differences(other, plan)
    assert set(found) == {"layers.2", "layers.0", "(root)"}
    assert "no module" in found["layers.2"]
    assert found["layers.0"] == "Block without it"


def test_all_units_that_are_other() -> None:
    plan = decide(Stack(), [*BLOCKS, *ROOT], shard_dims={"gain": 0, "layers.0.attend.weight": 1})
    other = Stack()
    other.layers[0].attend = nn.Linear(14, 14)
    other.layers[1].expand = nn.Linear(14, 22, dtype=torch.float64)
    other.layers[2].renamed = other.layers[2].norm
    del other.layers[2].norm
    other.head = nn.Linear(14, 6)
    found = _differences(other, plan)
    assert set(found) == {"layers.0.attend.bias", "unit layers.0", "unit layers.1", "unit layers.2", "unit (root)"}
    assert found["unit layers.0"] == f"{(28 + 196 + 14 + 330 + 322) * 4} bytes"


class TestAddedParameters:
    """What is new in a model is named, although a plan knows the digests of its keys only."""

    def test_a_new_module_in_a_unit_and_one_in_the_root(self) -> None:
        plan, other = decide(Stack(), [*BLOCKS, *ROOT]), Stack()
        other.layers[1].adapter = nn.Linear(14, 3)
        other.tail = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        found = _differences(other, plan)
        added = {key for key in found if not key.startswith("unit ")}
        assert added == {
            "layers.1.adapter.weight", "layers.1.adapter.bias", "tail.0.weight", "tail.0.bias", "tail.1.weight",
            "tail.1.bias",
        }  # fmt: skip
        assert found["layers.1.adapter.weight"] == "one of shape (3, 14) in layers.1"

    def test_pairs_beside_several_modules_as_low_rank_adapters_are(self) -> None:
        plan, other = decide(Stack(), [(("layers",), True), *ROOT]), Stack()
        for block in other.layers:
            block.expand.low_a, block.expand.low_b = nn.Linear(14, 2, bias=False), nn.Linear(2, 23, bias=False)
            block.attend.low_a, block.attend.low_b = nn.Linear(14, 2, bias=False), nn.Linear(2, 14, bias=False)
        plan = decide(Stack(), [*BLOCKS, *ROOT])
        found = {key for key in _differences(other, plan) if not key.startswith("unit ")}
        before = {key for key, _ in Stack().named_parameters()}
        assert found == {key for key, _ in other.named_parameters() if key not in before}
        assert len(found) == 12

    def test_where_names_changed_as_well_nothing_is_made_up(self) -> None:
        plan, other = decide(Stack(), [*BLOCKS, *ROOT]), Stack()
        other.layers[0].renamed = other.layers[0].norm
        del other.layers[0].norm
        other.layers[0].extra = nn.Linear(2, 2)
        found = _differences(other, plan)
        assert set(found) == {"unit layers.0"}


def test_a_tie_that_the_plan_does_not_know() -> None:
    plan = decide(TiedLM(), [(("embed",), True), *BLOCKS, *ROOT])
    found = _differences(TiedLM(), plan)
    assert found == {"embed.weight": "reached by several, as embed.weight, head.weight"}


def test_units_out_of_order_reach_a_parameter_twice() -> None:
    plan = decide(Stack(), [(("layers.0",), True), (("layers.0.norm",), True), *ROOT])
    found = _differences(Stack(), plan)
    assert {"layers.0.norm.weight", "layers.0.norm.bias"} <= set(found)


def test_a_module_below_two_units() -> None:
    model = nn.Module()
    shared = Block()
    model.left, model.right = nn.Sequential(shared), nn.Sequential(shared)
    plan = decide(model, [(("left",), True), (("right",), True), *ROOT])
    assert "reached by several" in _differences(model, plan)["left.0.norm.weight"]


def test_what_fully_shard_would_refuse_half_way() -> None:
    scaled = Scaled()
    assert _differences(scaled, decide(scaled, [*ROOT])) == {"scale": "a scalar"}

    model = Stack()
    model.layers[1].attend.weight = nn.Parameter(torch.zeros(14, 14).t())
    model.layers[2].norm.double()
    plan = decide(model, [(("layers",), True), *ROOT])
    found = _differences(model, plan)
    assert found["unit layers"] == "float32, float64"
    assert found["layers.1.attend.weight"] == "strides (1, 14)"
    with pytest.raises(PlanMismatchError, match="ModuleList without one"):
        apply_plan(model, plan)


def test_shard_dims_are_checked_for_the_group_that_is_there() -> None:
    plan = decide(Stack(), [*BLOCKS, *ROOT], shard_dims={"enter.weight": 1, "layers.0.norm.weight": 1})
    found = _differences(Stack(), plan)
    assert found == {
        "enter.weight": "3 there, which 2 devices do not divide",
        "layers.0.norm.weight": "shape (14,)",
    }


def test_meshes() -> None:
    one_axis, two_axes = decide(Stack(), [*ROOT]), decide(Stack(), [*ROOT], replicas=2)
    assert _differences(Stack(), two_axes) == {"mesh": "a process group of 2"}
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    assert _differences(Stack(), one_axis, mesh=square) == {"mesh": "a mesh of 2 axes (2 x 1)"}
    assert _differences(Stack(), two_axes, mesh=square) == {"mesh": "a mesh of 2 x 1"}
    dist.destroy_process_group()
    assert "init_process_group" in _differences(Stack(), one_axis)["mesh"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def test_mesh_and_model_are_told_together() -> None:
    other = Stack()
    other.head = nn.Linear(14, 6)
    assert set(_differences(other, decide(Stack(), [*ROOT], replicas=2))) == {"mesh", "unit (root)"}


def test_a_plan_of_one_axis_may_meet_a_group_of_another_size() -> None:
    plan = decide(Stack(), [*BLOCKS, *ROOT], shards=8)
    with pytest.warns(UserWarning, match="made for 8 devices and is applied to 2") as told:
        model = apply_plan(Stack(), plan)
    assert len(told) == 1
    assert isinstance(model, FSDPModule)


def test_a_sharded_model_is_refused() -> None:
    plan = decide(Stack(), [*BLOCKS, *ROOT])
    model = apply_plan(Stack(), plan)
    with pytest.raises(PlanMismatchError, match="fully_shard was applied already"):
        apply_plan(model, plan)


def test_a_lazy_parameter_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    plan = decide(nn.Sequential(nn.Linear(3, 3)), [*ROOT])
    assert set(_differences(model, plan)) == {"0.weight", "0.bias"}


def test_a_plan_without_the_root_is_refused() -> None:
    found = _differences(Stack(), decide(Stack(), [*BLOCKS]))
    assert found == {"units": "layers.2"}


def test_what_cannot_be_applied_yet_is_refused_by_name() -> None:
    with pytest.raises(PlanFormatError, match=r"\$\.offload"):
        apply_plan(Stack(), decide(Stack(), [*ROOT], offload="host"))
    with pytest.raises(PlanFormatError, match=r"\$\.precision\.param"):
        apply_plan(Stack(), decide(Stack(), [*ROOT], precision=Precision(param="float33")))


@pytest.mark.parametrize("plan", [None, "plan.json", {}])
@pytest.mark.usefixtures("group_of_two")
def test_what_is_no_plan_is_told_as_such(plan: object) -> None:
    with pytest.raises(RequestError, match="load_plan"):
        apply_plan(Stack(), plan)  # type: ignore[arg-type]
