"""How a loss is found where none is given."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from autoshard.capture.loss import find_loss
from autoshard.errors import CaptureError

Point = namedtuple("Point", ["logits", "loss"])
SCALAR = torch.ones((), requires_grad=True) * 3
LOGITS = torch.ones(2, 3, requires_grad=True) * 2
NO_GRAD = torch.ones(())


@dataclass
class Output:
    """Outputs with a loss."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


@pytest.mark.parametrize(
    ("outputs", "value", "how"),
    [
        (SCALAR, 3, "outputs"),
        (Output(LOGITS, SCALAR), 3, "outputs.loss"),
        (Point(LOGITS, SCALAR), 3, "outputs.loss"),
        ({"logits": LOGITS, "loss": SCALAR}, 3, "outputs['loss']"),
        ((LOGITS, SCALAR), 3, "outputs[1]"),
        ({"parts": [NO_GRAD, SCALAR]}, 3, "outputs['parts'][1]"),
        (LOGITS, 4, "mean square of the floating point outputs"),
        (Output(LOGITS), 4, "mean square of the floating point outputs"),
        ((LOGITS, LOGITS, NO_GRAD, torch.ones(3, dtype=torch.long)), 8, "mean square of the floating point outputs"),
    ],
)
def test_found(outputs: Any, value: float, how: str) -> None:
    loss, told = find_loss(outputs, None)
    assert told == how
    assert loss.item() == value


def test_given() -> None:
    def my_loss(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.sum()

    loss, told = find_loss(LOGITS, my_loss)
    assert (loss.item(), told) == (12, "my_loss(outputs)")


@pytest.mark.parametrize("outputs", [NO_GRAD, (NO_GRAD, 3), {}, None, "text", torch.ones(2, dtype=torch.long)])
def test_not_found(outputs: Any) -> None:
    with pytest.raises(CaptureError, match="give loss"):
        find_loss(outputs, None)
