"""Measure training steps on one rank: exact live bytes by phase and by kind, and the collectives of FSDP2.

``Meter`` goes around a training loop that somebody wrote; ``measure`` is the loop for those who have none. What comes
out is a ``Measurement``, the counterpart of a plan's ``Projection``. Following every op costs time: a measured step is
no measure of speed.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from autoshard.plan.measurement import Measurement
from autoshard.runtime.allocator import allocator_figures, restart_allocator
from autoshard.runtime.collectives import Collective, record_collectives
from autoshard.runtime.kind_bytes import KindBytes
from autoshard.runtime.live_bytes import held_bytes


class Meter:
    """Measures what happens inside its phases.

    Args:
        model: sharded or not.
        optimizer: the optimizer of its parameters.
        others: tensors that are there before the first phase and count as well, such as inputs.

    Examples:
        >>> model = nn.Linear(8, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> meter = Meter(model, optimizer)
        >>> for batch in (torch.ones(4, 8), torch.zeros(4, 8)):
        ...     with meter.step():
        ...         with meter.phase("forward"):
        ...             loss = model(batch).sum()
        ...         with meter.phase("backward"):
        ...             loss.backward()
        ...         with meter.phase("optimizer"):
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> meter.measurement().parameter_bytes
        72
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, others: Any = ()) -> None:
        self._model, self._optimizer = model, optimizer
        param = next(model.parameters())
        self._device_type = param.device.type
        self._live = KindBytes(self._device_type)
        for kind, tensors in self._existing(others):
            with self._live.made(kind):
                self._live.follow(tensors)
        self._peaks: dict[str, int] = {}
        self._kinds: dict[str, dict[str, int]] = {}
        self._gradient_bytes = 0
        self._issued: list[Collective] = []
        self._num_steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step; phases stand inside."""
        if not self._num_steps:
            restart_allocator(self._device_type)
        with self._live, self._live.watching(), record_collectives() as issued:
            yield
        self._issued += issued
        self._num_steps += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of a step, such as ``forward``. Its peak is kept by name over all steps."""
        self._live.restart_peak()
        # What an optimizer makes is of a moment, but for its state.
        with self._live.made("temporaries" if name == "optimizer" else "activations"):
            yield
        self._live.are("optimizer_state", self._optimizer_state())
        if self._live.peak > self._peaks.get(name, -1):
            self._peaks[name], self._kinds[name] = self._live.peak, self._live.by_kind()
        self._gradient_bytes = max(self._gradient_bytes, held_bytes(p.grad for p in self._model.parameters()))

    def measurement(self) -> Measurement:
        """What was measured so far.

        Raises:
            ValueError: no step was measured.
        """
        if not self._num_steps or not self._peaks:
            raise ValueError("no step was measured: put the training step inside meter.step() and meter.phase(...)")
        peak_phase = max(self._peaks, key=lambda name: self._peaks[name])
        parameter_bytes = held_bytes(self._model.parameters())
        optimizer_bytes = held_bytes(self._optimizer_state())
        gradients_now = held_bytes(param.grad for param in self._model.parameters())
        is_distributed = dist.is_available() and dist.is_initialized()
        return Measurement(
            device=self._device_type,
            rank=dist.get_rank() if is_distributed else 0,
            num_devices=dist.get_world_size() if is_distributed else 1,
            num_steps=self._num_steps,
            peak_bytes=self._peaks[peak_phase],
            peak_phase=peak_phase,
            peak_by_phase=dict(self._peaks),
            kinds_by_phase={name: dict(kinds) for name, kinds in self._kinds.items()},
            allocator=allocator_figures(self._device_type),
            parameter_bytes=parameter_bytes,
            gradient_bytes=self._gradient_bytes,
            optimizer_bytes=optimizer_bytes,
            other_bytes=self._live.now - parameter_bytes - optimizer_bytes - gradients_now,
            num_all_gathers=self._count("all-gather"),
            num_reduce_scatters=self._count("reduce-scatter"),
            num_all_reduces=self._count("all-reduce"),
            all_gather_bytes=self._bytes("all-gather"),
            reduce_scatter_bytes=self._bytes("reduce-scatter"),
            all_reduce_bytes=self._bytes("all-reduce"),
        )

    def _existing(self, others: Any) -> Iterator[tuple[str, Iterable[torch.Tensor | None]]]:
        yield "sharded_params", self._model.parameters()
        yield "sharded_grads", (param.grad for param in self._model.parameters())
        yield "buffers", self._model.buffers()
        yield "optimizer_state", self._optimizer_state()
        yield "inputs", (leaf for leaf in tree_leaves(others) if isinstance(leaf, torch.Tensor))

    def _optimizer_state(self) -> Iterator[torch.Tensor]:
        for state in self._optimizer.state.values():
            yield from (leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))

    def _count(self, kind: str) -> int:
        return _per_step(sum(1 for one in self._issued if one.kind == kind), self._num_steps)

    def _bytes(self, kind: str) -> int:
        return _per_step(sum(one.num_bytes for one in self._issued if one.kind == kind), self._num_steps)


def measure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compute_loss: Callable[[], torch.Tensor],
    num_steps: int = 2,
) -> Measurement:
    """Train for a few steps and measure them. The parameters change as in any training.

    One more step is run first and not measured, so that the optimizer's state exists.

    Args:
        model: sharded or not.
        optimizer: of the model's parameters.
        compute_loss: runs the model forward and returns the loss.
        num_steps: steps to measure.

    Returns:
        What was measured on this rank, with the phases ``forward``, ``backward`` and ``optimizer``.
    """
    compute_loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    meter = Meter(model, optimizer)
    for _ in range(num_steps):
        with meter.step():
            with meter.phase("forward"):
                loss = compute_loss()
            with meter.phase("backward"):
                loss.backward()
            with meter.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            del loss
    return meter.measurement()


def _per_step(total: int, num_steps: int) -> int:
    return total // num_steps
