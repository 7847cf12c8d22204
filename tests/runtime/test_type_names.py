"""Modules that are looked up by the printed name of their class are found when they are units too."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.runtime import apply_plan
from tests.runtime.plans import decide


class Known(nn.Module):
    """Its forward asks a table by class whether it doubles, as libraries do for what a model records."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * TABLE[str(type(self))]


TABLE = {str(Known): 2.0}


@pytest.fixture
def group_of_4() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_4")
def test_the_class_of_a_unit_prints_as_before() -> None:
    model = nn.Sequential(Known(), Known())
    names = [str(type(module)) for module in (model, model[0], model[1])]
    apply_plan(model, decide(model, [(("0",), True), (("1",), True), (("",), False)], shards=4))
    assert all(isinstance(module, FSDPModule) for module in (model, model[0], model[1]))
    assert [str(type(module)) for module in (model, model[0], model[1])] == names
    assert type(model[0]).__name__ == "Known"
    assert type(model[0]) is not Known
    model(torch.randn(4, 8)).sum().backward()
