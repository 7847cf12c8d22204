"""Train a sharded model beside the reference, on one rank.

The reference is one process that runs every rank's inputs in turn, averages the gradients, and steps once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.plan import Decisions
from autoshard.runtime import apply_plan
from tests.runtime.models import inputs, loss_of
from tests.runtime.ranks import note


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Greatest differences between the sharded training and the reference, relative to the reference.

    Attributes:
        loss: over the losses of all steps.
        param: over the parameters at the end, relative to the largest entry of each.
        keys: the state dict has the names that it had before.
        learned: the reference's loss changed by more than a tenth, so that equality says something.
    """

    loss: float
    param: float
    keys: bool
    learned: bool


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train_reference(model: nn.Module, rank: int, world: int, steps: int, entry: str = "forward") -> list[float]:
    optimizer, losses = make_optimizer(model), []
    for step in range(steps):
        for other in range(world):
            loss = loss_of(_call(model, entry)(inputs(model, step, other)))
            (loss / world).backward()
            if other == rank:
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(model: nn.Module, rank: int, steps: int, entry: str = "forward") -> list[float]:
    optimizer, losses = make_optimizer(model), []
    for step in range(steps):
        note(f"step {step}: forward")
        loss = loss_of(_call(model, entry)(inputs(model, step, rank)))
        note(f"step {step}: backward")
        loss.backward()
        note(f"step {step}: optimizer")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(
    rank: int,
    world: int,
    build: Callable[[], nn.Module],
    plan: Decisions,
    steps: int = 20,
    before: Callable[[nn.Module], None] | None = None,
) -> Comparison:
    """Train both and compare. ``before`` runs on the sharded model before its optimizer is made."""
    torch.manual_seed(3)
    reference = build()
    torch.manual_seed(3)
    model = build()
    keys = list(model.state_dict())
    expected = train_reference(reference, rank, world, steps, plan.entry)
    note("apply_plan")
    apply_plan(model, plan)
    if before is not None:
        note("before")
        before(model)
    losses = train(model, rank, steps, plan.entry)
    note("compare")
    whole = dict(model.named_parameters())
    gaps = [_gap(_full(whole[name].detach()), param.detach()) for name, param in reference.named_parameters()]
    return Comparison(
        loss=max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        param=max(gaps),
        keys=list(model.state_dict()) == keys,
        learned=abs(expected[-1] / expected[0] - 1) > 0.1,
    )


def _call(model: nn.Module, entry: str) -> Callable[..., Any]:
    return model if entry == "forward" else getattr(model, entry)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()
