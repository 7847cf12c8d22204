"""What has to happen around the outermost call of the root, whichever of its methods runs the step.

FSDP2's own hooks stand around ``forward`` and around the methods registered with ``register_fsdp_forward_method``. A
few things of a plan have to stand around those in turn:

* After a forward without gradients, units with ``reshard`` false are resharded. FSDP2 keeps them unsharded until a
  backward that never comes; ``model.parameters()`` would yield plain, temporary tensors, and an optimizer built at
  that moment would update values that the next reshard throws away, without an error. Training steps are not touched;
  the price is one more all-gather of those units for each evaluation batch.
* Before the first forward of a model that was on meta, buffers that nothing has filled stop it.
* Before a forward, replicated parameters get the hook that averages their gradients, unless they have it: moving a
  model off meta makes new parameter objects, and hooks do not move along.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule


class RootCalls:
    """Runs functions before and one after the outermost call of a root module."""

    def __init__(self, before: Sequence[Callable[[], None]], after: Callable[[], None]) -> None:
        self._before, self._after = before, after
        self._depth = 0

    def install(self, root: nn.Module, methods: Sequence[str]) -> None:
        """Attach to the root's forward and to its other registered methods, outside of FSDP2's own hooks."""
        root.register_forward_pre_hook(self._enter, prepend=True)
        root.register_forward_hook(self._leave, always_call=True)
        for name in methods:
            setattr(root, name, self._around(getattr(root, name)))

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            for each in self._before:
                each()

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._after()

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._enter()
            try:
                return method(*args, **kwargs)
            finally:
                self._leave()

        return called


def reshard_after_evaluation(kept: Iterable[nn.Module]) -> Callable[[], None]:
    """A function that reshards the units of the given modules if gradients are off."""
    modules = tuple(kept)

    @torch.compiler.disable
    def after() -> None:
        if torch.is_grad_enabled():
            return
        for module in modules:
            assert isinstance(module, FSDPModule)
            module.reshard()

    return after


def average_gradients(root: nn.Module, keys: Iterable[str], mesh: DeviceMesh) -> Callable[[], None]:
    """A function that makes sure that each parameter's gradient is averaged over the mesh once it is accumulated.

    With several micro-batches before one optimizer step, what was averaged before is averaged again, which changes
    nothing, and the new part is added as its mean: the sum of the means, as for the sharded parameters.

    Args:
        root: the model.
        keys: FQNs of the replicated parameters.
        mesh: ranks over all of whose axes to average.
    """
    names = tuple(keys)
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    hooked: dict[str, torch.Tensor] = {}

    def average(param: torch.Tensor) -> None:
        assert param.grad is not None
        for group in groups:
            dist.all_reduce(param.grad, group=group)
        param.grad /= mesh.size()

    def before() -> None:
        for name in names:
            param = root.get_parameter(name)
            if param.requires_grad and hooked.get(name) is not param:
                param.register_post_accumulate_grad_hook(average)
                hooked[name] = param

    return before
