"""Kinds of models that naive wrapping breaks, on two ranks: it fails as said, and the plan made here trains.

Each rank has inputs and random numbers of its own; the reference runs both in one process and averages the gradients.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.request import Request
from autoshard.runtime import apply_plan
from tests.runtime.ranks import note, run_ranks, try_ranks

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.enter(x))).square().mean()


class Skips(Net):
    """Layer drop with a coin."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = layer(x)
        return x


class Branches(Net):
    """A value decides which of two like layers runs: nothing hangs, values are wrong."""

    def body(self, x: Tensor) -> Tensor:
        return self.layers[0](x) if x.mean() > 0 else self.layers[1](x)


class Passes(Net):
    """A value decides how often a layer runs."""

    def body(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.sum().abs().item() * 10) % 3):
            x = self.layers[0](x)
        return self.layers[1](x)


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.act(x))


class PreActivated(Net):
    block = Changes


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(self.lin(x).square().mean())
        return x


class HandsOut(Net):
    """Layers return their input and put their work into a list."""

    block = Beside

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, kept)
        return self.head(x).square().mean() + torch.stack(kept).sum()


class AsksForShape(Net):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x * self.layers[0].down.bias.new_ones(WIDTH))


class ReadsInHook(Net):
    def body(self, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad * (1 + self.layers[1].up.bias.mean()))
        return super().body(x)


class ByClass(Net):
    """Exact classes: blocks that are units take the other way, without a word."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if type(layer) is Block else x
        return x


KINDS: dict[str, tuple[type[Net], str]] = {
    "skips": (Skips, "lost"),
    "branches": (Branches, "wrong"),
    "passes": (Passes, "lost"),
    "pre-activated": (PreActivated, "is being modified inplace"),
    "hands out": (HandsOut, "setStorage"),
    "shape": (AsksForShape, "mixed torch.Tensor and DTensor"),
    "hook": (ReadsInHook, "mixed torch.Tensor and DTensor"),
    "class": (ByClass, "wrong"),
}


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Greatest differences to the reference over the losses and over the parameters at the end."""

    loss: float
    param: float


def _inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(17 + 10 * step + rank))


def _build(kind: str) -> Net:
    torch.manual_seed(2)
    return KINDS[kind][0]()


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return model(_inputs(step, rank))


def trained(rank: int, world: int, kind: str, naive: bool) -> Gap:
    reference, model = _build(kind), _build(kind)
    if naive:
        mesh = init_device_mesh("cpu", (world,))
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh)
    else:
        request = Request(device="cpu", devices=2)
        apply_plan(model, autoshard.make_plan(model, ((_inputs(0, 0),), {}), request=request))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    gap = 0.0
    for step in range(4):
        expected = [_loss(reference, step, other) for other in range(world)]
        torch.stack(expected).mean().backward()
        note(f"step {step}")
        loss = _loss(model, step, rank)
        loss.backward()
        gap = max(gap, abs(loss.item() - expected[rank].item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    values = [(a.full_tensor() if isinstance(a, DTensor) else a, b) for a, b in pairs]
    return Gap(loss=gap, param=max((a - b).abs().max().item() for a, b in values))


def all_kinds(rank: int, world: int) -> dict[str, Gap]:
    return {kind: trained(rank, world, kind, naive=False) for kind in KINDS}


@pytest.mark.slow
def test_plans_of_all_kinds_train_as_one_process() -> None:
    for gaps in run_ranks(all_kinds, seconds=240):
        for kind, gap in gaps.items():
            assert gap.loss < 1e-6, kind
            assert gap.param < 1e-6, kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_wrapping_each_layer_fails_as_said(kind: str) -> None:
    how = KINDS[kind][1]
    outcomes = try_ranks(trained, kind, True, seconds=15 if how == "lost" else 60)
    if how == "wrong":
        assert max(one.value.param for one in outcomes) > 1e-4
    elif how == "lost":
        assert any(one.error is not None for one in outcomes)
    else:
        assert any(how in str(one.error) for one in outcomes)
