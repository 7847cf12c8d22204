"""What the parts of a plan do beside parity: structure at 64 ranks, precision, recompute, evaluation, meta."""

import dataclasses
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.errors import ApplyError
from autoshard.plan import Precision
from autoshard.runtime import apply_plan, record_collectives
from autoshard.runtime.confirm import confirm
from autoshard.runtime.match import match
from autoshard.runtime.mesh import make_mesh
from tests.runtime.models import Scaled, Stack, TiedLM, inputs, loss_of
from tests.runtime.plans import decide
from tests.runtime.ranks import run_ranks
from tests.runtime.training import Comparison, compare, train, train_reference

pytestmark = pytest.mark.slow

BLOCKS = [((f"layers.{i}",), True) for i in range(3)]
ROOT = ((("",), False),)
LAST_TWO = ((("norm", "head"), False), *ROOT)


@pytest.fixture
def group_of_64() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_64")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_axis_of_64(device: str) -> None:
    with torch.device(device):
        model = TiedLM()
    plan = decide(model, [*BLOCKS, *ROOT], shards=64)
    model = apply_plan(model, plan)
    assert [name for name, module in model.named_modules() if isinstance(module, FSDPModule)] == [
        "",
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    assert all(isinstance(param, DTensor) and param.placements == (Shard(0),) for param in model.parameters())
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.to_local().shape == (1, 14)  # row 5 of 37
    assert model.layers[0].expand.weight.to_local().shape == (1, 14)  # row 5 of 22
    assert model.norm.weight.to_local().device.type == device


@pytest.mark.usefixtures("group_of_64")
def test_two_axes_of_64() -> None:
    plan = decide(Stack(), [*BLOCKS, *LAST_TWO], shards=2, replicas=32, shard_dims={"layers.1.attend.weight": 1})
    model = apply_plan(Stack(), plan)
    assert model.head.weight.device_mesh.mesh_dim_names == ("replicate", "shard")
    assert model.head.weight.device_mesh.shape == (32, 2)
    assert model.head.weight.placements == (Replicate(), Shard(0))
    assert model.layers[1].attend.weight.placements == (Replicate(), Shard(1))
    assert model.norm._get_fsdp_state() is model.head._get_fsdp_state()


@pytest.mark.usefixtures("group_of_64")
def test_everything_is_passed_to_fully_shard_and_read_back() -> None:
    precision = Precision(param="bfloat16", reduce="float32", output="float32", cast_inputs=False)
    plan = decide(Stack(), [*BLOCKS, *LAST_TWO], shards=64, precision=precision, reduce_unused=True)
    model = apply_plan(Stack(), plan)
    for name, reshard in [("layers.0", True), ("norm", False), ("head", False), ("", False)]:
        state = model.get_submodule(name)._get_fsdp_state()
        (group,) = state._fsdp_param_groups
        assert (group.post_forward_mesh_info is not None) == reshard
        assert not state._auto_reshard_after_forward
        assert state._mp_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, False)
        assert group.reduce_scatter_unused_params


@pytest.mark.usefixtures("group_of_64")
def test_confirm_sees_what_is_not_as_planned() -> None:
    plan = decide(Stack(), [*BLOCKS, *ROOT], shards=64)
    model = Stack()
    matched, _ = match(model, plan, None)
    assert matched is not None
    mesh = make_mesh(model, plan, None)
    with pytest.raises(ApplyError, match=r"layers\.0 is not sharded") as caught:
        confirm(model, plan, matched, mesh)
    assert (caught.value.modules, caught.value.phase) == (("layers.0",), "confirm")

    apply_plan(model, plan)
    mesh = model.gain.device_mesh
    confirm(model, plan, matched, mesh)
    model.layers[1].set_reshard_after_forward(False)
    with pytest.raises(ApplyError, match="reshard is False, planned True"):
        confirm(model, plan, matched, mesh)
    model.layers[1].set_reshard_after_forward(True)

    model.extra = nn.Linear(2, 2)
    with pytest.raises(ApplyError, match=r"appeared: extra\.bias, extra\.weight"):
        confirm(model, plan, matched, mesh)
    del model.extra

    untied = dataclasses.replace(matched, places={**matched.places, "gain": ("gain", "norm.weight")})
    with pytest.raises(ApplyError, match=r"gain is no longer tied to norm\.weight"):
        confirm(model, plan, untied, mesh)
    owned = ({**matched.owned[0], "gain": model.gain}, *matched.owned[1:])
    with pytest.raises(ApplyError, match="lacks gain"):
        confirm(model, plan, dataclasses.replace(matched, owned=owned), mesh)


@pytest.mark.usefixtures("group_of_64")
def test_what_torch_refuses_is_an_apply_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("torch says no")

    monkeypatch.setattr(sys.modules["autoshard.runtime.apply"], "fully_shard", refuse)
    with pytest.raises(ApplyError, match=r"layers\.0 \(shard\): ValueError: torch says no") as caught:
        apply_plan(Stack(), decide(Stack(), [*BLOCKS, *ROOT], shards=64))
    assert isinstance(caught.value.__cause__, ValueError)


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(inputs(model, 0, 0))
        if isinstance(model, Stack):
            model.training_step(inputs(model, 0, 0))


def _forward_before_optimizer(rank: int, world: int) -> list[Comparison]:
    forward = decide(Stack(), [*BLOCKS, *LAST_TWO])
    other_entry = decide(Stack(), [*BLOCKS, *LAST_TWO], entry="training_step")
    return [compare(rank, world, Stack, plan, before=_evaluate) for plan in (forward, other_entry)]


def test_an_optimizer_made_after_an_evaluation_trains_all_parameters() -> None:
    for outcomes in run_ranks(_forward_before_optimizer):
        for found in outcomes:
            assert found.loss <= 1e-5
            assert found.param <= 1e-4


def _collectives_of(rank: int, world: int) -> tuple[int, int, int]:
    model = apply_plan(Stack(), decide(Stack(), [*BLOCKS, *LAST_TWO]))
    counts = []
    for grad in (True, False, True):
        with torch.set_grad_enabled(grad), record_collectives() as issued:
            loss = loss_of(model(inputs(model, 0, rank)))
            if grad:
                loss.backward()
        counts.append(len(issued))
    assert all(isinstance(param, DTensor) for param in model.parameters())
    return counts[0], counts[1], counts[2]


def test_evaluation_adds_no_collective_to_training() -> None:
    assert run_ranks(_collectives_of) == [(5 + 3 + 5, 5, 5 + 3 + 5)] * 2


def _precision(rank: int, world: int) -> dict[str, str]:
    found = {}
    for name, precision in {
        "cast": Precision(param="bfloat16", reduce="float32"),
        "output": Precision(param="bfloat16", reduce="float32", output="float32"),
        "uncast": Precision(param="bfloat16", reduce="float32", cast_inputs=False),
    }.items():
        model = apply_plan(Stack(), decide(Stack(), [*BLOCKS, *LAST_TWO], precision=precision))
        try:
            output = model(inputs(model, 0, rank))
        except RuntimeError as error:
            found[name] = str(error)
            continue
        output.float().sum().backward()
        assert model.gain.grad.dtype == torch.float32
        found[name] = str(output.dtype)
    return found


def test_precision_of_inputs_and_outputs() -> None:
    for found in run_ranks(_precision):
        assert found["cast"] == "torch.bfloat16"
        assert found["output"] == "torch.float32"
        assert "same dtype" in found["uncast"]


def _count_recomputed(rank: int, world: int) -> list[int]:
    model = Stack()
    apply_plan(model, decide(model, [*BLOCKS, *ROOT], recompute=("layers.1",)))
    calls = [0, 0, 0]
    for index, layer in enumerate(model.layers):

        def count(*_: object, index: int = index) -> None:
            calls[index] += 1

        layer.expand.register_forward_pre_hook(count)
    loss_of(model(inputs(model, 0, rank))).backward()
    return calls


def test_only_what_the_plan_names_is_recomputed() -> None:
    assert run_ranks(_count_recomputed) == [[1, 2, 1]] * 2


def _replicated_with_micro_batches(rank: int, world: int) -> tuple[float, float]:
    """Gradient of the replicated scalar after two micro-batches, and that of the reference."""
    torch.manual_seed(3)
    reference = Scaled()
    with torch.device("meta"):
        model = Scaled()
    apply_plan(model, decide(model, [*ROOT], replicated=("scale",)))
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, strict=True)
    set_model_state_dict(model, {key: one.clone() for key, one in reference.state_dict().items()}, options=options)
    for step in range(2):
        loss_of(model(inputs(model, step, rank))).backward()
        for other in range(world):
            (loss_of(reference(inputs(reference, step, other))) / world).backward()
    return model.scale.grad.item(), reference.scale.grad.item()


def test_replicated_gradients_are_averaged_after_meta_and_over_micro_batches() -> None:
    for found, expected in run_ranks(_replicated_with_micro_batches):
        assert found == pytest.approx(expected, rel=1e-6)


def _meta_then_weights(rank: int, world: int) -> float:
    torch.manual_seed(3)
    reference = TiedLM()
    weights = {key: one.clone() for key, one in reference.state_dict().items()}
    with torch.device("meta"):
        model = TiedLM()
    apply_plan(model, decide(model, [*BLOCKS, *ROOT]))
    model.to_empty(device="cpu")
    assert model.head.weight is model.embed.weight
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights if rank == 0 else {}, options=options)
    assert model.head.weight is model.embed.weight
    assert list(model.state_dict()) == list(weights)
    train_reference(reference, rank, world, 3)
    train(model, rank, 3)
    whole = {name: param.full_tensor() for name, param in model.named_parameters()}
    return max((whole[name] - param).abs().max().item() for name, param in reference.named_parameters())


def test_meta_then_plan_then_weights_trains_like_the_reference() -> None:
    assert all(gap < 1e-5 for gap in run_ranks(_meta_then_weights))


def _meta_then_init(rank: int, world: int) -> tuple[list[float], list[float], float]:
    with torch.device("meta"):
        model = Stack()
    apply_plan(model, decide(model, [*BLOCKS, *ROOT]))
    model.to_empty(device="cpu")
    torch.manual_seed(17 + rank)
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)
    drawn = model.layers[0].attend.weight.full_tensor()
    losses = train(model, rank, 20)
    return drawn[0].tolist(), drawn[7].tolist(), losses[-1] / losses[0]


def test_meta_then_plan_then_init_with_a_seed_by_rank() -> None:
    for first, eighth, ratio in run_ranks(_meta_then_init):
        assert first != eighth
        assert ratio < 1


class Sometimes(nn.Module):
    """A scalar that only ranks with a positive first entry use; another that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.spare = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * self.scale if x[0, 0] > 0 else y


def _skipped_on_one_rank(rank: int, world: int) -> tuple[float, bool]:
    torch.manual_seed(0)
    model = Sometimes()
    apply_plan(model, decide(model, [*ROOT], replicated=("scale", "spare"), reduce_unused=True))
    x = torch.ones(1, 4) * (1 - 2 * rank)
    out = model(x)
    out.sum().backward()
    grad = model.scale.grad
    assert grad is not None
    return grad.item() * world - (out.sum() / model.scale).item() * (rank == 0), model.spare.grad is None


@pytest.mark.slow
def test_a_replicated_parameter_that_one_rank_does_not_use_is_averaged_and_nothing_hangs() -> None:
    (first, no_grad), (second, _) = run_ranks(_skipped_on_one_rank, seconds=60)
    assert no_grad
    assert abs(first) < 1e-6
    torch.manual_seed(0)
    assert abs(second - Sometimes().linear(torch.ones(1, 4)).sum().item()) < 1e-6
