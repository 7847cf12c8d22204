"""Measured bytes by kind: each storage is told apart by who allocated it, in FSDP2's own functions.

Independent of the simulation: it knows no rule of what should be there. Storages that are made in forward or backward
and that nobody claims are activations.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from autoshard.runtime.live_bytes import LiveBytes, local_tensor

_GROUP = _fsdp_param_group.FSDPParamGroup


class KindBytes(LiveBytes):
    """Live bytes, and what they were at the peak.

    Args:
        device_type: only storages on devices of this type count.

    Attributes:
        at_peak: storage and size at the peak.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.at_peak: list[tuple[int, int]] = []
        self._kind = "activations"
        self._numbers: dict[int, int] = {}
        self._kinds: list[str] = []

    def _size(self, storage: torch.UntypedStorage) -> None:
        key, before = storage._cdata, self.peak
        is_new = key not in self._sizes
        if is_new:
            self._numbers[key] = len(self._kinds)
            self._kinds.append(self._kind)
        super()._size(storage)
        if self.peak > before:
            self._note()

    def restart_peak(self) -> None:
        """Forget the peak and what it was made of."""
        super().restart_peak()
        self._note()

    def _note(self) -> None:
        self.at_peak = [(self._numbers[key], size) for key, size in self._sizes.items()]

    def by_kind(self) -> dict[str, int]:
        """What the peak was made of."""
        found: dict[str, int] = {}
        for number, size in self.at_peak:
            if size:
                kind = "temporaries" if self._kinds[number] == "copies" else self._kinds[number]
                found[kind] = found.get(kind, 0) + size
        return found

    @contextmanager
    def made(self, kind: str) -> Iterator[None]:
        """What is made inside is of this kind."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def are(self, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """These are of this kind, and have been."""
        for tensor in tensors:
            if tensor is not None:
                number = self._numbers.get(local_tensor(tensor).untyped_storage()._cdata)
                if number is not None:
                    self._kinds[number] = kind

    @contextmanager
    def watching(self) -> Iterator[None]:
        """FSDP2's functions say what they make."""
        with ExitStack() as stack:
            for owner, name, kind in (
                (_fsdp_param_group, "foreach_all_gather", "temporaries"),
                (_fsdp_param_group, "foreach_all_gather_copy_out", "copies"),
                (FSDPParam, "init_all_gather_outputs", "unsharded_params"),
                (FSDPParam, "alloc_all_gather_outputs", "unsharded_params"),
                (_GROUP, "post_backward", "unsharded_grads"),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._around(getattr(owner, name), kind)))
            reduce = self._reducing(_fsdp_collectives.foreach_reduce)
            stack.enter_context(mock.patch.object(_fsdp_param_group, "foreach_reduce", reduce))
            allocate = _fsdp_collectives.DefaultAllocMixin.allocate
            stack.enter_context(
                mock.patch.object(_fsdp_collectives.DefaultAllocMixin, "allocate", self._allocating(allocate))
            )
            yield

    def _around(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if isinstance(args[0], _GROUP):
                self._claim_gradients(args[0])
            with self.made(kind):
                return function(*args, **kwargs)

        return call

    def _claim_gradients(self, group: Any) -> None:
        for param in group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            self.are("unsharded_grads", [None if whole is None else whole.grad, param.unsharded_accumulated_grad])

    def _reducing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(params: Any, *args: Any, **kwargs: Any) -> Any:
            with self.made("sharded_grads"):
                result = function(params, *args, **kwargs)
            self.are("sharded_grads", (param.sharded_param.grad for param in params))
            return result

        return call

    def _allocating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.made("all_gather_buffers" if self._kind == "temporaries" else "reduce_scatter_buffers"):
                return function(*args, **kwargs)

        return call
