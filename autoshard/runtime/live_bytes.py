"""Exact live bytes: which tensor storages exist on a device at each moment, and their sum.

A dispatch mode sees every op's results; a weak reference tells when a storage dies; ``resize_``, with which FSDP2 frees
and allocates unsharded parameters in place, is followed by replacing the method. The sum is what CUDA's allocator calls
allocated, without rounding to its block size, and it works on CPU, where there is no such counter.

[Note: fake tensors] The first optimizer step of a process runs DTensor's sharding propagation on fake tensors of the
global shape. They hold no bytes, so they are left out.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def held_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the storages behind some tensors on this rank, each storage once; padding of shards included."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None and _has_bytes(local_tensor(tensor)):
            storage = local_tensor(tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class LiveBytes(TorchDispatchMode):
    """Follows storages while it is entered.

    Args:
        device_type: only storages on devices of this type count.

    Attributes:
        now: bytes alive now.
        peak: the most that was alive since ``restart_peak``.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._device_type = device_type
        self._sizes: dict[int, int] = {}
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resize: Callable[..., Any] | None = None

    def follow(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Count tensors that existed before the mode was entered."""
        for tensor in tensors:
            if tensor is not None:
                self._see(local_tensor(tensor))

    def restart_peak(self) -> None:
        """Forget the peak: from here on it is what is alive now."""
        self.peak = self.now

    def __enter__(self) -> "LiveBytes":
        assert self._resize is None, "entered twice"
        self._resize = resize = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._size(storage)
            return result

        torch.UntypedStorage.resize_ = followed  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign,assignment]
        self._resize = None
        super().__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # let DTensor split the op first; its local ops come back here
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        if _has_bytes(tensor) and tensor.device.type == self._device_type:
            self._size(tensor.untyped_storage())

    def _size(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            if storage.device.type != self._device_type:
                return

            def died(_: Any) -> None:
                self.now -= self._sizes.pop(key)
                del self._deaths[key]

            self._deaths[key] = weakref.ref(storage, died)
        self.now += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)


def _has_bytes(tensor: torch.Tensor) -> bool:
    # See [Note: fake tensors].
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta" and tensor.layout == torch.strided
