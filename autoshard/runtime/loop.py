"""What a training loop does around forward and backward: micro-batches, clipping, the optimizer by its name.

These are the helpers whose bytes ``simulate`` projects; a loop that does the same by hand costs the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autoshard.errors import RequestError
from autoshard.plan import Decisions
from autoshard.request import OPTIMIZERS

T = TypeVar("T")

_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adamw-foreach": ("AdamW", {"foreach": True}),
    "adamw-fused": ("AdamW", {"fused": True}),
    "adamw-for-loop": ("AdamW", {"foreach": False}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
}
"""Class in ``torch.optim`` and options of each optimizer but torchao's."""


def accumulate(model: nn.Module, plan: Decisions, batches: Sequence[T]) -> Iterator[T]:
    """The micro-batches of one step in turn; FSDP2 reduces gradients as the plan says.

    With ``gradient_sync: last`` nothing is reduced before the last one: fewer reductions, and the whole gradients of
    all units stay on every rank until then. Divide the loss of each by their number for the mean over all.

    Args:
        model: to which the plan was applied.
        plan: the plan.
        batches: as many as ``plan.micro_batches``.

    Raises:
        RequestError: the model is not sharded, or there is another number of batches.

    Examples:
        >>> for batch in accumulate(model, plan, batches):  # doctest: +SKIP
        ...     (model(batch).loss / plan.micro_batches).backward()
    """
    if not isinstance(model, FSDPModule):
        raise RequestError("model", type(model).__name__, "a model to which apply_plan was applied")
    if len(batches) != plan.micro_batches:
        raise RequestError("batches", len(batches), f"{plan.micro_batches}, as many micro-batches as the plan has")
    try:
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            model.set_requires_gradient_sync(is_last or plan.gradient_sync == "every")
            yield batch
    finally:
        model.set_requires_gradient_sync(True)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their norm over all ranks is ``max_norm`` at most; the norm before.

    torch's own refuses models with sharded and whole parameters side by side; here each whole one counts once. Every
    rank calls it, after backward.

    Args:
        model: sharded or not.
        max_norm: more than 0.
        norm_type: of the norm, 1 or more; ``float("inf")`` for the largest entry.

    Raises:
        RequestError: a number out of its range.

    Examples:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> clip_grad_norm_(model, 1.0)
        tensor(5.)
        >>> model.weight.grad
        tensor([[0.6000, 0.8000]])
    """
    if not max_norm > 0:
        raise RequestError("max_norm", max_norm, "a number greater than 0")
    if not norm_type >= 1:
        raise RequestError("norm_type", norm_type, "a number of 1 or more, or infinity")
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    sharded = [grad for grad in grads if isinstance(grad, DTensor)]
    local = [grad._local_tensor for grad in sharded]
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    device = (local or whole or [torch.empty(0)])[0].device
    total = _power(local, norm_type, device)
    if sharded:
        mesh = sharded[0].device_mesh
        is_largest = norm_type == float("inf")
        dist.all_reduce(
            total, op=dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=mesh.get_group(mesh.ndim - 1)
        )
    rest = _power(whole, norm_type, device)
    norm = torch.maximum(total, rest) if norm_type == float("inf") else (total + rest) ** (1.0 / norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in (*local, *whole):
        grad.mul_(scale)
    return norm


def _power(grads: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum over all entries of their ``norm_type``-th power, or the largest; in float32 or more."""
    filled = [grad for grad in grads if grad.numel()]
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in filled) else torch.float32
    if not filled:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack([_norm(grad, norm_type, dtype) for grad in filled])
    return norms.max() if norm_type == float("inf") else (norms**norm_type).sum()


def _norm(grad: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    if grad.is_complex():
        return torch.linalg.vector_norm(grad, norm_type).to(dtype)
    return torch.linalg.vector_norm(grad, norm_type, dtype=dtype)


def make_optimizer(name: str, params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """The optimizer that a request names.

    Args:
        name: one of ``request.OPTIMIZERS``.
        params: of the sharded model.
        **options: for the optimizer, such as ``lr``.

    Raises:
        RequestError: the name is unknown, or needs a library that is not installed.

    Examples:
        >>> make_optimizer("sgd-momentum", nn.Linear(2, 1).parameters(), lr=0.1).defaults["momentum"]
        0.9
    """
    if name == "adamw-8bit":
        if find_spec("torchao") is None:
            raise RequestError("optimizer", name, "torchao, which is not installed: pip install torchao")
        made: torch.optim.Optimizer = import_module("torchao.optim").AdamW8bit(params, **options)
        return made
    if name not in _OPTIONS:
        raise RequestError("optimizer", name, "one of " + ", ".join(OPTIMIZERS))
    class_name, fixed = _OPTIONS[name]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, class_name)(params, **{**options, **fixed})
    return optimizer
