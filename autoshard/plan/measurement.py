"""What was measured on one rank during training steps, as data: stands beside a plan's ``Projection`` in reports.

It lives here and not in ``runtime`` so that a report needs no torch. Names are those of ``Projection`` where the same
thing is meant.
"""

import msgspec


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes and collectives of one rank.

    Bytes are those of tensor storages that were alive on the device at the same time, what the allocator calls
    allocated, without its rounding.

    Attributes:
        device: device type, such as ``cpu``.
        rank: the rank that was measured.
        num_devices: devices that trained together.
        num_steps: steps that were measured.
        peak_bytes: the most that was alive at once.
        peak_phase: phase in which that was.
        peak_by_phase: the most that was alive at once in each phase, in the order of the phases.
        kinds_by_phase: what each of these peaks was made of, bytes by kind as in ``Projection.by_kind``; each storage
            is told apart by who allocated it.
        allocator: the device allocator's own figures over the measured steps: ``allocated_peak``, ``requested_peak``,
            ``reserved_peak``, ``inactive_split_peak`` in bytes, ``num_retries``; empty where there is none.
        parameter_bytes: the rank's shards of the parameters, with their padding, at the end of the measurement.
        gradient_bytes: the most that the shards of the gradients held at the end of a phase.
        optimizer_bytes: the rank's part of the optimizer's state at the end of the measurement.
        other_bytes: what else was alive at the end of the measurement: buffers, inputs, what the caller holds.
        num_all_gathers: all-gathers of one step.
        num_reduce_scatters: reduce-scatters of one step.
        num_all_reduces: all-reduces of one step.
        all_gather_bytes: sum of their output buffers, of one step.
        reduce_scatter_bytes: sum of their input buffers, of one step.
        all_reduce_bytes: sum of their buffers, of one step.
    """

    device: str
    rank: int
    num_devices: int
    num_steps: int
    peak_bytes: int
    peak_phase: str
    peak_by_phase: dict[str, int]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    other_bytes: int
    num_all_gathers: int
    num_reduce_scatters: int
    num_all_reduces: int
    all_gather_bytes: int
    reduce_scatter_bytes: int
    all_reduce_bytes: int
    kinds_by_phase: dict[str, dict[str, int]] = {}
    allocator: dict[str, int] = {}

    @property
    def steady_bytes(self) -> int:
        """Alive between steps: parameters and optimizer state, as in ``Projection.steady_bytes``."""
        return self.parameter_bytes + self.optimizer_bytes
