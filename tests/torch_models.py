"""The random models of ``random_graphs`` as real modules: what the rules say of them can be tried on FSDP2 itself."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn

from tests.graphs import Mod, Par, calls_of
from tests.random_graphs import random_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class State:
    """A result in which FSDP2 finds no tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def _open(x: Any) -> torch.Tensor:
    return x.x if isinstance(x, State) else x


class Container(nn.Module):
    """A module without forward."""

    def __init__(self, spec: Mod, modules: dict[int, nn.Module], params: dict[int, nn.Parameter]) -> None:
        super().__init__()
        modules[id(spec)] = self
        self.spec = spec
        for name, par in spec.params.items():
            if id(par) not in params:
                params[id(par)] = _parameter(par)
            self.register_parameter(name, params[id(par)])
        for child in spec.children:
            made = modules.get(id(child))
            self.add_module(child.name, made or (Module if child.has_forward else Container)(child, modules, params))


class Module(Container):
    """A module that does what its ``Mod`` says: call children, read parameters, hide its result."""

    def forward(self, x: Any) -> Any:
        x = _open(x)
        spec = self.spec
        steps = spec.body
        if steps is None:
            steps = (*calls_of(spec, ""), *(("own",) if spec.params or not spec.children else ()))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not spec.no_grad):
            for step in steps:
                x = self._step(step, x)
        return State(x) if spec.output_kind.startswith("opaque:") else x

    def _step(self, step: str, x: torch.Tensor) -> torch.Tensor:
        if step == "own":
            return _op(x, self)
        if step.startswith("peek "):
            return _op(x, self.get_submodule(step.removeprefix("peek ")))
        child = self.get_submodule(step)
        assert isinstance(child, Module)
        return _open(child(x if child.spec.takes_grad else State(x)))


def _parameter(par: Par) -> nn.Parameter:
    shape = tuple(min(size, 50) for size in par.shape)
    return nn.Parameter((torch.randn(shape) / 2).to(_DTYPES[par.dtype]), requires_grad=par.requires_grad)


def _op(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    x = x + torch.tanh(x)
    for param in module.parameters(recurse=False):
        value = param.float()
        x = torch.tanh(x * (1 + value.mean()) + value.sin().mean() / 10)
    return x


def real_model(random: Random, seed: int) -> tuple[nn.Module, Callable[[Any], torch.Tensor]]:
    """A random model and the loss of its outputs; equal for equal random states and seeds."""
    spec, loss_reads = random_model(random)
    torch.manual_seed(seed)
    model = Module(spec, {}, {})

    def loss(outputs: Any) -> torch.Tensor:
        total = _open(outputs).mean()
        for key in loss_reads:
            total = total + model.get_parameter(key).float().sin().mean()
        return total

    return model, loss


def example_input() -> torch.Tensor:
    """The input of every step."""
    return torch.linspace(-1, 1, 8).reshape(4, 2)


def train(model: nn.Module, loss: Callable[[Any], torch.Tensor], num_steps: int = 2) -> list[float]:
    """Losses of a few steps of SGD."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.5)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        value = loss(model(example_input()))
        value.backward()  # type: ignore[no-untyped-call]
        losses.append(value.item())
        optimizer.step()
    return losses
