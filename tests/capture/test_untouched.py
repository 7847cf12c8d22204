"""The model and the process are left exactly as they were, also after a failure."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from autoshard.capture import capture, capture_tree
from autoshard.errors import CaptureError
from tests.models import MODELS, build, floats


def _picture(model: nn.Module) -> list[Any]:
    """Identities and contents of everything that a model holds."""
    parts: list[Any] = []
    for name, module in model.named_modules():
        attributes = {key: id(value) for key, value in vars(module).items()}
        lists = {key: list(map(id, value)) for key, value in vars(module).items() if isinstance(value, list)}
        plain = {key: value for key, value in vars(module).items() if isinstance(value, int | float | str)}
        tensors = {key: (id(t), t.grad is None) for group in ("_parameters", "_buffers")
                   for key, t in getattr(module, group).items() if t is not None}  # fmt: skip
        parts.append((name, attributes, lists, plain, tensors, module.training))
    return parts


def _process() -> tuple[Any, ...]:
    return (
        nn.Module._call_impl,
        nn.Module.register_parameter,
        F.scaled_dot_product_attention,
        torch.utils.checkpoint.CheckpointFunction,
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        len(torch.nn.modules.module._global_forward_hooks),
        torch.utils._python_dispatch._get_current_dispatch_mode(),
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_after_a_capture(name: str) -> None:
    model, inputs = build(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before, process = _picture(model), _process()
    capture(model, inputs, compute_dtype="bfloat16", device_kind="cuda")
    capture_tree(model)
    assert _picture(model) == before
    assert _process() == process
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


class Remembers(nn.Module):
    """Changes itself in each forward."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.seen: list[Any] = ["before"]
        self.table: dict[str, Any] = {"inner": [1]}
        self.count = 0
        self.fails = fails
        self.alias = [self.lin.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.count += 1
        self.seen.append(x)
        self.table["inner"].append(2)
        self.table["new"] = x
        self.extra = x
        random.random()
        torch.rand(2)
        if self.fails:
            raise KeyError("wrong on purpose")
        return self.lin(x)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_model_that_changes_itself(fails: bool, training: bool) -> None:
    model = Remembers(fails).train(training)
    before, process = _picture(model), _process()
    if fails:
        with pytest.raises(CaptureError, match="wrong on purpose"):
            capture(model, ((floats(2, 3),), {}))
    else:
        capture(model, ((floats(2, 3),), {}))
    assert _picture(model) == before
    assert _process() == process
    assert model.seen == ["before"]
    assert model.table == {"inner": [1]}
    assert model.steps.item() == 0
    assert model.alias[0] is model.lin.weight


def test_gradients_and_inputs_stay() -> None:
    model, x = nn.Linear(3, 3), floats(2, 3)
    model(x).sum().backward()
    grad = model.weight.grad
    tokens = torch.tensor([1, 2])

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = model

        def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            tokens.add_(1)
            x.mul_(0)
            return self.lin(x)

    given = x.clone()
    capture(Adds(), ((given, tokens), {}))
    assert model.weight.grad is grad
    assert tokens.tolist() == [1, 2]
    assert torch.equal(given, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_modules_get_their_parameters_back() -> None:
    scripted = torch.jit.script(nn.Linear(3, 3))
    model = nn.Sequential(nn.Linear(3, 3), scripted)
    weight = scripted.weight.clone()
    graph = capture(model, ((floats(2, 3),), {}))
    assert torch.equal(scripted.weight, weight)
    assert "script" in next(node for node in graph.modules if node.fqn == "1").traits


def test_evaluation_mode_of_a_part_is_kept() -> None:
    model, inputs = build("convolutional")
    model.drop.eval()
    targets = [op.target for op in capture(model, inputs).root.forward]
    assert not any("dropout" in target or "bernoulli" in target for target in targets)
    assert model.training
    assert not model.drop.training


def test_a_loss_of_other_arguments_is_the_users_error() -> None:
    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return outputs.mean()

    with pytest.raises(CaptureError, match=r"the loss failed: TypeError"):
        capture(torch.nn.Linear(4, 4), ((torch.zeros(2, 4),), {}), loss=loss)  # type: ignore[arg-type]


class Frozen(dict):
    """A configuration that refuses every change once it is made."""

    def update(self, *parts: Any, **named: Any) -> None:
        raise TypeError("frozen")

    clear = update  # type: ignore[assignment]


def test_a_container_that_cannot_be_changed_is_left_alone() -> None:
    model, inputs = build(sorted(MODELS)[0])
    model.options = Frozen(width=4, kinds=["a"])  # type: ignore[assignment]
    capture(model, inputs)
    assert model.options == {"width": 4, "kinds": ["a"]}
