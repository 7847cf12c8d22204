"""A step that fails is one error: which module, what, the user's own line, and a remedy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import capture
from autoshard.errors import CaptureError, RequestError
from tests.models import HIDDEN, Stack, floats, ids

GOOD = ((floats(4, HIDDEN),), {})


def test_a_failing_forward_names_the_innermost_module_and_line() -> None:
    class Reshapes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(7, 13)

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reshapes()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "x.reshape(7, 13)" in text)
    with pytest.raises(CaptureError) as caught:
        capture(nn.Sequential(nn.Linear(HIDDEN, 3), Holds()), GOOD)
    assert caught.value.fqn == "1.inner"
    assert "RuntimeError: shape '[7, 13]' is invalid" in caught.value.reason
    assert f"test_errors.py:{line}" in caught.value.reason
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("inputs", "fqn", "reason"),
    [
        (((), {}), "(root)", "missing 1 required positional argument: 'x'"),
        (((floats(4, 3),), {}), "layers.0.norm", "RuntimeError"),
        (((ids(4, HIDDEN),), {}), "layers.0.norm", "Error"),
        ((("text",), {}), "layers.0.norm", "TypeError"),
        (((floats(4, HIDDEN),), {"mask": None}), "(root)", "unexpected keyword argument 'mask'"),
    ],
)
def test_inputs_that_do_not_fit(inputs: Any, fqn: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Stack(), inputs)
    assert caught.value.fqn == fqn
    assert reason in caught.value.reason
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda out: out, "not a single element"),
        (lambda out: 3.0, "is a float, not a tensor"),
        (lambda out: out.detach().mean(), "does not depend on any parameter"),
        (lambda out: out.nothing, "the loss failed: AttributeError"),
    ],
)
def test_a_loss_that_is_none(loss: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Stack(), GOOD, loss=loss)
    assert caught.value.fqn == "(root)"
    assert reason in caught.value.reason


def test_nothing_to_train() -> None:
    with pytest.raises(CaptureError, match="no tensor in the outputs requires a gradient"):
        capture(Stack().requires_grad_(False), GOOD)


def test_a_failing_backward() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("no derivative here")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(HIDDEN, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Fails.apply(self.lin(x))

    with pytest.raises(CaptureError, match=r"the backward failed: ArithmeticError: no derivative here \(.*test_errors"):
        capture(Model(), GOOD)


def test_lazy_modules_are_refused_before_they_change() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, 3), nn.LazyLinear(2))
    with pytest.raises(CaptureError) as caught:
        capture(model, GOOD)
    assert caught.value.fqn == "1"
    assert isinstance(model[1].weight, nn.parameter.UninitializedParameter)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("model", {"model": 3}),
        ("inputs", {"inputs": floats(2, 3)}),
        ("inputs", {"inputs": ((floats(2, 3),),)}),
        ("inputs", {"inputs": []}),
        ("entry", {"entry": "no_such_method"}),
        ("compute_dtype", {"compute_dtype": "int8"}),
        ("device_kind", {"device_kind": "tpu"}),
    ],
)
def test_questions_that_cannot_be_asked(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        capture(**{"model": Stack(), "inputs": GOOD, **options})
    assert caught.value.field == field


class TakesFloatTable(nn.Module):
    """A float32 buffer meets parameters."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(HIDDEN, 3)
        self.register_buffer("table", torch.ones(HIDDEN))
        self.casts = casts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x + (self.table.to(x.dtype) if self.casts else self.table))


def test_a_float_buffer_in_half_precision_is_told_and_captured_as_stored() -> None:
    graph = capture(TakesFloatTable(casts=False), GOOD, compute_dtype="bfloat16")
    (warning,) = graph.diagnostics
    assert (warning.code, warning.severity, warning.where) == ("AS101", "warning", "lin")
    assert "addmm takes tensors of one dtype, got torch.bfloat16 and torch.float32" in warning.message
    assert "test_errors.py" not in warning.message
    assert "too large" in warning.message
    assert graph.compute_dtype == "float32"
    stored = capture(TakesFloatTable(casts=False), GOOD)
    assert stored.diagnostics == ()
    assert stored.root == graph.root


def test_a_cast_buffer_is_fine_and_no_buffer_is_cast() -> None:
    graph = capture(TakesFloatTable(casts=True), GOOD, compute_dtype="bfloat16")
    assert graph.diagnostics == ()
    assert graph.compute_dtype == "bfloat16"
    assert graph.buffers[0].dtype == "float32"
    assert graph.params[0].dtype == "float32"  # as stored


def test_devices_in_the_forward_do_not_matter() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(HIDDEN, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps = torch.arange(3, device="cuda") + torch.zeros(3).to("cuda:1") + torch.ones(3, device="meta")
            return self.lin(x.cuda()) + steps.to(x.device)

    capture(Moves(), GOOD, device_kind="cuda")


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda x: torch.from_numpy(x.detach().numpy()), "RuntimeError: .numpy() is not supported"),
        (lambda x: {}["missing"], "KeyError: 'missing'"),
        (lambda x: exit(3), "SystemExit: 3"),
    ],
)
def test_whatever_the_forward_raises_is_one_error(ask: Callable[[Any], Any], reason: str) -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(HIDDEN, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x) + ask(x)

    with pytest.raises(CaptureError) as caught:
        capture(nn.Sequential(Asks()), GOOD)
    assert caught.value.fqn == "0"
    assert reason in caught.value.reason
    assert "test_errors.py" in caught.value.reason


def test_other_failures_are_not_tried_again_in_float32() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x.dtype)
            raise KeyError("missing")

    calls: list[torch.dtype] = []
    with pytest.raises(CaptureError, match="missing"):
        capture(Fails(), GOOD, compute_dtype="bfloat16")
    assert calls == [torch.bfloat16]
