"""A plan that is applied is read back as it was; what people shard by hand is read as what they wrote."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.errors import RequestError
from autoshard.plan import Axis, Decisions, decisions_of
from autoshard.runtime import read_plan

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


INPUTS = ((torch.zeros(2, 5, dtype=torch.long),), {})


@contextmanager
def group(size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _units(plan: Decisions) -> list[tuple[tuple[str, ...], bool]]:
    return [(unit.modules, unit.reshard) for unit in plan.units]


@pytest.mark.parametrize(
    "options", [{}, {"mesh": "2x2"}, {"recompute": "full"}, {"precision": "bf16"}, {"reshard": "never"}]
)
def test_an_applied_plan_is_read_back(options: dict[str, str]) -> None:
    request = autoshard.Request(device="cpu", devices=4, **options)  # type: ignore[arg-type]
    plan = autoshard.make_plan(Net(), INPUTS, request=request)
    with group(4):
        found = read_plan(autoshard.apply_plan(Net(), plan))
    assert found == decisions_of(plan)


def test_what_was_sharded_by_hand() -> None:
    model = Net()
    with group(4):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        checkpoint(model.blocks[0])
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda p: Shard(p.dim() - 1))
        register_fsdp_forward_method(model.blocks[1], "encode")
        fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        found = read_plan(fully_shard(model, mesh=mesh, mp_policy=policy))
    blocks = [((f"blocks.{index}",), True) for index in range(3)]
    assert _units(found) == [*blocks, (("norm", "head"), False), (("",), False)]
    assert found.mesh == (Axis(name="replicate", size=2, role="replicate"), Axis(name="shard", size=2, role="shard"))
    assert (found.precision.param, found.precision.reduce) == ("bfloat16", "float32")
    assert found.units[0].shard_dims == {"blocks.0.down.weight": 1, "blocks.0.up.weight": 1}
    assert (found.units[0].num_params, found.units[0].num_bytes) == (4, 4 * (128 + 16 + 128 + 8))
    assert found.recompute == ("blocks.0",)
    assert [(method.module, method.method) for method in found.methods] == [("blocks.1", "encode")]


def test_wrappers_do_not_change_names() -> None:
    model = Net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    with group(2):
        for block in model.blocks:
            fully_shard(block)
        found = read_plan(fully_shard(model))
    assert _units(found) == [*(((f"blocks.{index}",), True) for index in range(3)), (("",), False)]
    assert found.recompute == ("blocks.0", "blocks.1", "blocks.2")
    verified = autoshard.make_plan(Net(), INPUTS, request=autoshard.Request(device="cpu", devices=2, root_percent=0))
    assert {unit.digest for unit in found.units[:3]} <= {unit.digest for unit in verified.units}


def test_what_was_read_can_be_applied() -> None:
    with group(2):
        model = Net()
        fully_shard(model.blocks[1])
        found = read_plan(fully_shard(model))
        again = read_plan(autoshard.apply_plan(Net(), found))
    assert again == found


def _unsharded(model: Net) -> None:
    pass


def _without_root(model: Net) -> None:
    fully_shard(model.blocks[0])


def _over_two_meshes(model: Net) -> None:
    fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    fully_shard(model)


def _by_halves(model: Net) -> None:
    fully_shard(model.blocks[0], reshard_after_forward=2)
    fully_shard(model)


def _in_two_precisions(model: Net) -> None:
    fully_shard(model.blocks[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model)


@pytest.mark.parametrize(
    ("shard", "told"),
    [
        (_unsharded, "root is sharded"),
        (_without_root, "root is sharded"),
        (_over_two_meshes, "one mesh"),
        (_by_halves, "true or false"),
        (_in_two_precisions, "one precision"),
    ],
)
def test_what_a_plan_cannot_say_is_refused(shard: Callable[[Net], None], told: str) -> None:
    model = Net()
    with group(4):
        shard(model)
        with pytest.raises(RequestError, match=told):
            read_plan(model)


def test_no_model() -> None:
    with pytest.raises(RequestError, match="Module"):
        read_plan(msgspec.UNSET)  # type: ignore[arg-type]
