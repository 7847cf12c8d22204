"""Clocks in max-plus form: every rule of FSDP2's streams is a maximum of sums, so a piece of the step is a matrix.

A clock is a row of coefficients over the clocks at the start of a piece: its value is the largest of start plus
coefficient. The rules are those of ``simulate.fold``, event by event; a piece of the step is written down once and then
holds for every state in which it may begin. ``NEVER`` stands for no dependence.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.int64]
Matrix = npt.NDArray[np.int64]

NEVER = -(1 << 56)
"""Coefficient that never binds: far below all times, and far enough from the least integer to add some of them."""

FORWARD = ("compute", "host", "gather", "shard", "copied")
"""Clocks that forward hands on."""

BACKWARD = ("compute", "host", "gather", "shard", "arrival", "input", "reduced", "replicate")
"""Clocks that backward hands on."""


def identity(size: int) -> list[Row]:
    """Each clock as itself."""
    rows = np.full((size, size), NEVER, np.int64)
    np.fill_diagonal(rows, 0)
    return list(rows)


@dataclass(slots=True)
class Clocks:
    """The clocks while a piece of the step is written down; the events are those of ``simulate.fold``.

    Attributes:
        is_serial: nothing overlaps: after each event all streams are where the last one is.
        compute: the compute stream is free.
        host: the host has issued everything so far.
        gather: the copy-in stream is free.
        shard: the shard axis's communicator is free.
        copied: the copy-out whose buffer is deferred is done.
        arrival: the all-gather in flight is done.
        input: the reduce-scatter whose input is alive is done.
        reduced: all reductions are done.
        replicate: the replicate axis's communicator is free.
    """

    is_serial: bool
    compute: Row
    host: Row
    gather: Row
    shard: Row
    copied: Row
    arrival: Row
    input: Row
    reduced: Row
    replicate: Row

    @classmethod
    def start(cls, names: tuple[str, ...], is_serial: bool) -> "Clocks":
        """All clocks, those named as themselves."""
        rows = dict(zip(names, identity(len(names)), strict=True))
        never = np.full(len(names), NEVER, np.int64)
        return cls(is_serial, **{name: rows.get(name, never) for name in cls.__slots__ if name != "is_serial"})

    def matrix(self, names: tuple[str, ...]) -> Matrix:
        """Coefficients of the named clocks, one row each."""
        rows: Matrix = np.stack([getattr(self, name) for name in names])
        return np.maximum(rows, NEVER)

    def hook(self, host_ns: int) -> None:
        """Host work of a unit's hooks."""
        self.host = self.host + host_ns
        self._level()

    def run(self, compute_ns: int, launch_ns: int) -> None:
        """Ops: the device starts when the host has come so far, and waits where the host is behind at their end."""
        self.compute = np.maximum(self.compute, self.host) + compute_ns + (launch_ns if self.is_serial else 0)
        self.host = self.host + launch_ns
        self.compute = np.maximum(self.compute, self.host)
        self._level()

    def issue(self, copy_ns: int, gather_ns: int) -> None:
        """An all-gather is issued: shards are copied into its buffer, then it runs."""
        self.gather = np.maximum(self.gather, self.host) + copy_ns
        self.shard = self.arrival = np.maximum(self.gather, self.shard) + gather_ns
        self._level()

    def copy_out(self, copy_ns: int, is_deferred: bool) -> None:
        """It is waited for and copied out; in forward its buffer is kept, and the one before freed."""
        self.compute = np.maximum(self.compute, self.arrival) + copy_ns
        self.arrival = np.full_like(self.arrival, NEVER)
        if is_deferred:
            self.gather = np.maximum(self.gather, self.copied)
            self.copied = self.compute
        else:
            self.gather = np.maximum(self.gather, self.compute)
        self._level()

    def flush(self) -> None:
        """The deferred buffer is freed once its copy-out is done."""
        self.gather = np.maximum(self.gather, self.copied)
        self.copied = np.full_like(self.copied, NEVER)
        self._level()

    def release(self) -> None:
        """Compute waits for the reduce-scatter whose input is alive."""
        self.compute = np.maximum(self.compute, self.input)
        self.input = np.full_like(self.input, NEVER)
        self._level()

    def reduce(self, copy_ns: int, scatter_ns: int, all_reduce_ns: int | None) -> None:
        """Gradients are copied and reduced; over replicas too unless ``all_reduce_ns`` is ``None``."""
        self.compute = self.compute + copy_ns
        done = np.maximum(np.maximum(self.compute, self.host), self.shard) + scatter_ns
        self.shard = self.input = done
        if all_reduce_ns is not None:
            self.replicate = done = np.maximum(done, self.replicate) + all_reduce_ns
        self.reduced = np.maximum(self.reduced, done)
        self._level()

    def finish(self) -> None:
        """Compute waits for all reductions."""
        self.compute = np.maximum(self.compute, self.reduced)
        self._level()

    def optimize(self, step_ns: int) -> None:
        """The optimizer's step."""
        self.compute = np.maximum(self.compute, self.host) + step_ns
        self._level()

    def _level(self) -> None:
        if self.is_serial:
            rows = (self.compute, self.host, self.gather, self.shard, self.replicate)
            latest = rows[0]
            for row in rows[1:]:
                latest = np.maximum(latest, row)
            self.compute = self.host = self.gather = self.shard = self.replicate = latest
