"""What has to happen around the outermost call of the root, whichever of its methods runs the step.

FSDP2's own hooks stand around ``forward`` and around the methods registered with ``register_fsdp_forward_method``. A
few things of a plan have to stand around those in turn:

* After a forward without gradients, units with ``reshard`` false are resharded. FSDP2 keeps them unsharded until a
  backward that never comes; ``model.parameters()`` would yield plain, temporary tensors, and an optimizer built at
  that moment would update values that the next reshard throws away, without an error. Training steps are not touched;
  the price is one more all-gather of those units for each evaluation batch.
* Before the first forward of a model that was on meta, buffers that nothing has filled stop it.
* Around a forward, what averages the gradients of replicated parameters gets its hooks (``replicated``).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class RootCalls:
    """Runs functions before and after the outermost call of a root module; those after it get its result."""

    def __init__(self, before: Sequence[Callable[[], None]], after: Sequence[Callable[[Any], None]]) -> None:
        self._before, self._after = before, after
        self._depth = 0

    def install(self, root: nn.Module, methods: Sequence[str]) -> None:
        """Attach to the root's forward and to its other registered methods, outside of FSDP2's own hooks."""
        root.register_forward_pre_hook(self._enter, prepend=True)
        root.register_forward_hook(self._leave, always_call=True)
        for name in methods:
            setattr(root, name, self._around(root, getattr(root, name)))

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            for each in self._before:
                each()

    def _leave(self, root: nn.Module, args: Any, result: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            for each in self._after:
                each(result)

    def _around(self, root: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._enter()
            result = None
            try:
                result = method(*args, **kwargs)
                return result
            finally:
                self._leave(root, args, result)

        return called


def reshard_after_evaluation(kept: Iterable[nn.Module]) -> Callable[[Any], None]:
    """A function that reshards the units of the given modules if gradients are off."""
    modules = tuple(kept)

    @torch.compiler.disable
    def after(_: Any) -> None:
        if torch.is_grad_enabled():
            return
        for module in modules:
            assert isinstance(module, FSDPModule)
            module.reshard()

    return after
