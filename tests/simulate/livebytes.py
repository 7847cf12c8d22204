"""Exact live bytes of tensors on this process, and the collectives that it issues: what projections are held against.

``LiveBytes`` sees every storage that an op returns (a dispatch mode), follows FSDP2's freeing and allocating in place
(``UntypedStorage.resize_`` is patched) and drops a storage when Python's last reference is gone. ``FakeTensor`` is
skipped: the first optimizer step runs DTensor's sharding propagation on fake tensors of the global shape.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages; ``peaks`` holds the highest count of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.total = 0
        self.phase = "before"
        self.peaks: dict[str, int] = {}

    def start(self, phase: str) -> None:
        """Peaks count for this phase from now on."""
        self.phase = phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.total)

    def track(self, tensors: Iterable[Any]) -> None:
        """Count the storages of these tensors too."""
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(local, torch.Tensor) and not isinstance(local, FakeTensor) and local.device.type == "cpu":
                self._see(local.untyped_storage())

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.size()
        if key not in self.references:
            self.references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.total += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.total)

    def _forget(self, key: int) -> None:
        self.references.pop(key, None)
        self.total -= self.sizes.pop(key, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.track(tree_leaves(result))
        return result

    def __enter__(self) -> "LiveBytes":
        self._resize = torch.UntypedStorage.resize_
        original, counter = self._resize, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            counter._see(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(kind, error, trace)


@dataclass
class Collectives:
    """Records ``(kind, bytes of the large buffer, dtype)`` of every collective that FSDP2 issues."""

    log: list[tuple[str, int, str]] = field(default_factory=list)

    def __enter__(self) -> "Collectives":
        self.originals = {name: getattr(dist, name) for name in _KINDS}
        for name, kind in _KINDS.items():
            setattr(dist, name, self._recorder(self.originals[name], kind))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)

    def _recorder(self, original: Any, kind: str) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            large = max(tensors, key=lambda tensor: tensor.nbytes)
            self.log.append((kind, large.nbytes, str(large.dtype).removeprefix("torch.")))
            return original(*args, **kwargs)

        return record


_KINDS = {
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_reduce": "all_reduce",
}
