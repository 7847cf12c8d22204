"""The loss of a step: the user's function, or a scalar found in the outputs.

Without a function the loss is, in this order: the outputs' ``loss`` (attribute or key), the outputs themselves if they
are a scalar, the first scalar among them, and at last the mean square of all floating point outputs, which trains
nothing of use but has the same shapes. Which of them was taken stands in the plan.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoshard.capture.containers import named_tensors
from autoshard.errors import CaptureError

REMEDY = "give loss(outputs) that returns one scalar tensor which depends on a trainable parameter"


def find_loss(outputs: Any, loss: Callable[[Any], Any] | None) -> tuple[torch.Tensor, str]:
    """The loss tensor, and for people how it was found.

    Args:
        outputs: what the model returned.
        loss: the user's function of the outputs, if there is one.

    Raises:
        CaptureError: there is no loss that gradients flow from.
    """
    found, how = _given(outputs, loss) if loss is not None else _searched(outputs)
    if not isinstance(found, torch.Tensor):
        raise CaptureError("(root)", f"{how} is a {type(found).__name__}, not a tensor", REMEDY)
    if found.numel() != 1:
        raise CaptureError("(root)", f"{how} has shape {list(found.shape)}, not a single element", REMEDY)
    if not found.requires_grad:
        raise CaptureError("(root)", f"{how} does not depend on any parameter that requires a gradient", REMEDY)
    return found, how


def _given(outputs: Any, loss: Callable[[Any], Any]) -> tuple[Any, str]:
    return loss(outputs), f"{getattr(loss, '__name__', 'loss')}(outputs)"


def _searched(outputs: Any) -> tuple[torch.Tensor, str]:
    named = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(named, torch.Tensor):
        return named, "outputs['loss']" if type(outputs) is dict else "outputs.loss"
    tensors = [(path, t) for path, t in named_tensors(outputs, "outputs") if t.is_floating_point()]
    for path, tensor in tensors:
        if tensor.dim() == 0 and tensor.requires_grad:
            return tensor, path
    trained = [tensor for _, tensor in tensors if tensor.requires_grad]
    if not trained:
        raise CaptureError("(root)", "no tensor in the outputs requires a gradient, so there is no loss", REMEDY)
    squares = [tensor.float().square().mean() for tensor in trained]
    return torch.stack(squares).sum() if len(squares) > 1 else squares[0], "mean square of the floating point outputs"
