"""Gradients of replicated parameters, averaged over the mesh once in each backward.

Every rank has to take part, also one whose step did not use a parameter. So the average is not taken when a gradient
arrives, but at the end of the backward, all in one reduction, which a hook on the root's results asks for on every
rank. Where the root's results show no tensor, the arrival of a gradient asks for it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.containers import visible_tensors


class AverageReplicated:
    """Averages the gradients of a model's replicated parameters.

    With several micro-batches before one optimizer step, what was averaged before is averaged again, which changes
    nothing, and the new part is added as its mean: the sum of the means, as for the sharded parameters.

    Args:
        root: the model.
        keys: FQNs of the replicated parameters.
        mesh: ranks over all of whose axes to average.
    """

    def __init__(self, root: nn.Module, keys: Iterable[str], mesh: DeviceMesh) -> None:
        self._root, self._keys, self._mesh = root, tuple(keys), mesh
        self._watched: dict[str, torch.Tensor] = {}
        self._is_queued = False

    def before(self) -> None:
        """Before a forward of the root: each parameter tells when its gradient arrives.

        Moving a model off meta makes new parameter objects, and hooks do not move along.
        """
        for key in self._keys:
            param = self._root.get_parameter(key)
            if param.requires_grad and self._watched.get(key) is not param:
                param.register_post_accumulate_grad_hook(self._ask)
                self._watched[key] = param

    def after(self, result: Any) -> None:
        """After a forward of the root: its backward will end with the average."""
        if self._watched and torch.is_grad_enabled():
            for tensor in visible_tensors(result):
                if tensor.requires_grad:
                    tensor.register_hook(self._ask)

    def _ask(self, _: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._is_queued = False
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for param in self._watched.values():
            by_dtype.setdefault(param.dtype, []).append(param)
        for params in by_dtype.values():
            self._average_alike(params)

    @torch.no_grad()
    def _average_alike(self, params: Sequence[torch.Tensor]) -> None:
        """One reduction for parameters of one dtype: their gradients, and for each how many ranks have one."""
        parts = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        counts = params[0].new_tensor([param.grad is not None for param in params])
        whole = torch.cat([*(part.reshape(-1) for part in parts), counts])
        for axis in range(self._mesh.ndim):
            dist.all_reduce(whole, group=self._mesh.get_group(axis))
        *means, counts = whole.split([part.numel() for part in parts] + [len(params)])
        del parts
        is_missing = any(param.grad is None for param in params)
        on_some_rank = [bool(count) for count in counts.real.tolist()] if is_missing else [True] * len(params)
        for param, mean, has_any in zip(params, means, on_some_rank, strict=True):
            if param.grad is not None:
                param.grad.copy_(mean.div_(self._mesh.size()).view_as(param))
            elif has_any:
                param.grad = mean.div(self._mesh.size()).view_as(param)
