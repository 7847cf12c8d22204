"""What a parameter carries beside its values follows it when it is sharded; on two ranks where gradients flow."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.runtime import apply_plan
from tests.runtime.plans import decide
from tests.runtime.ranks import note, run_ranks

ROOT = ((("",), False),)
UNITS = ((("0",), True), (("2",), True), *ROOT)


def _net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


MASK = torch.tensor([[0.0], [1.0], [1.0], [1.0], [1.0], [1.0]])


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


HOOKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "doubled": lambda p: p.register_hook(lambda grad: grad * 2),
    "masked": lambda p: p.register_hook(lambda grad: grad * MASK),
    "clipped": lambda p: p.register_hook(lambda grad: grad / (grad.norm() + 1)),
    "two in order": lambda p: (p.register_hook(lambda g: g + 1), p.register_hook(lambda g: g * 3)),
    "accumulated": lambda p: p.register_post_accumulate_grad_hook(_halve),
}


def _gaps(rank: int, world: int) -> dict[str, tuple[float, float]]:
    """For each hook the gap to the reference over three steps, and that of a run whose hooks are lost."""
    found = {}
    for name, hook in HOOKS.items():
        note(name)
        gaps = []
        for is_hooked in (True, False):
            reference, model = _net(), _net()
            hook(reference[2].weight)
            if is_hooked:
                hook(model[2].weight)
            apply_plan(model, decide(model, [*UNITS]))
            gaps.append(_train(reference, model, rank, world, once=name == "accumulated"))
        found[name] = (gaps[0], gaps[1])
    return found


def _train(reference: nn.Module, model: nn.Module, rank: int, world: int, once: bool) -> float:
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (reference, model)]
    for step in range(3):
        batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)]
        if once:  # a hook on what has accumulated runs once for each backward: one backward of the mean
            torch.stack([reference(batch).square().mean() for batch in batches]).mean().backward()
        else:
            for batch in batches:
                (reference(batch).square().mean()).backward()
            for param in reference.parameters():
                assert param.grad is not None
                param.grad /= world
        model(batches[rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((a.full_tensor() - b).abs().max().item() for a, b in pairs if isinstance(a, DTensor))


@pytest.mark.slow
def test_hooks_train_as_in_one_process_and_their_loss_would_show() -> None:
    for gaps in run_ranks(_gaps, seconds=120):
        for name, (followed, lost) in gaps.items():
            assert followed < 1e-6, name
            assert lost > 1e-4, name


@pytest.fixture
def group_of_2() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Holder:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


@pytest.mark.usefixtures("group_of_2")
def test_second_references_become_the_sharded_parameter() -> None:
    model = _net()
    weight, frozen = model[2].weight, model[0].bias
    frozen.requires_grad_(False)
    model.decayed = [weight, {"again": weight}]
    model.holder = Holder(weight)
    model.ask = lambda: weight
    model.fixed = (weight, functools.partial(torch.abs, weight))
    model.constants = [frozen]
    apply_plan(model, decide(model, [*UNITS]))
    new = model[2].weight
    assert isinstance(new, DTensor)
    assert model.decayed[0] is model.decayed[1]["again"] is model.holder.weight is model.ask() is new
    assert model.fixed[0] is not new
    assert model.constants[0] is frozen


@pytest.mark.usefixtures("group_of_2")
def test_attributes_follow_to_both_forms() -> None:
    model = _net()
    model[2].weight.no_decay = True
    apply_plan(model, decide(model, [*UNITS]))
    assert model[2].weight.no_decay
    seen = []
    model[2].register_forward_pre_hook(lambda module, _: seen.append(module.weight.no_decay))
    model(torch.zeros(2, 6)).sum().backward()
    assert seen == [True]


@pytest.mark.usefixtures("group_of_2")
def test_a_list_that_its_module_renews_is_left_to_it() -> None:
    model = nn.LSTM(4, 4)
    apply_plan(model, decide(model, [*ROOT]))
    assert all(one is param for one, param in zip(model._flat_weights, model.parameters(), strict=True))
