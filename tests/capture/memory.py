"""An independent oracle for memory: live bytes of a real step on the cpu, and the same figures from a graph.

``LiveBytes`` counts the storages that ops give back on real tensors; nothing of autoshard is used. ``replay`` adds and
removes the storages of a region one op at a time.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard.ir import Region


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive now, and the most there were."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def died(_: object) -> None:
            del self._alive[key]
            self.now -= nbytes

        self._alive[key] = weakref.ref(storage, died)
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def real_step(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], loss: Callable[[Any], torch.Tensor]
) -> tuple[int, int]:
    """(bytes held at the end of the forward, peak bytes) of one real step beyond parameters, buffers and inputs."""
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    gc.collect()
    gc.disable()
    try:
        with LiveBytes([*model.parameters(), *model.buffers(), *given]) as live:
            outputs = model(*args, **kwargs)
            scalar = loss(outputs)
            del outputs
            held = live.now
            scalar.backward()
            return held, live.peak
    finally:
        gc.enable()
        model.zero_grad(set_to_none=True)


def replay(region: Region) -> tuple[int, int]:
    """(bytes held at the end of the forward, peak bytes) that a region says."""
    total = len(region.forward) + len(region.backward)
    change = [0] * (total + 1)
    for storage in region.storages:
        if storage.born.phase == "caller":
            continue
        change[_time(storage.born, region)] += storage.nbytes
        end = total if storage.dies.phase == "caller" else _time(storage.dies, region) + 1
        change[end] -= storage.nbytes
    alive, held, peak = 0, 0, 0
    for time in range(total):
        alive += change[time]
        peak = max(peak, alive)
        if time == len(region.forward) - 1:
            held = alive + change[time + 1] - sum(s.nbytes for s in region.storages if _is_first(s.born, region))
    return held, peak


def _time(moment: Any, region: Region) -> int:
    return moment.index + (len(region.forward) if moment.phase == "backward" else 0)


def _is_first(moment: Any, region: Region) -> bool:
    return moment.phase == "backward" and moment.index == 0
