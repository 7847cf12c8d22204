"""Time of an op by the roofline: it is bound by arithmetic or by memory, whichever takes longer.

What the host needs to launch it is not part of it: the host is a clock of its own (``DeviceProfile.launch_ns``), and
the device waits only where the host is behind.
"""

from dataclasses import dataclass

from autoshard.hardware import DeviceProfile
from autoshard.ir import OpNode

NS_PER_SECOND = 10**9
ATTENTION = "_attention"
"""In the names of torch's fused attention ops, such as ``aten._scaled_dot_product_flash_attention``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reaches, not what its datasheet says: the peaks times the achievable fractions.

    Attributes:
        flops_per_second: floating point operations in the compute dtype.
        attention_flops_per_second: the same inside fused attention, which also works on exponentials.
        bytes_per_second: bytes read and written.
        launch_ns: host time for one kernel.
    """

    flops_per_second: int
    attention_flops_per_second: int
    bytes_per_second: int
    launch_ns: int


def rates(profile: DeviceProfile, dtype: str) -> Rates:
    """Rates for computing in ``dtype``; a dtype that the profile does not list computes at float32's rate."""
    peak = profile.flops_per_second.get(dtype, profile.flops_per_second["float32"])
    return Rates(
        flops_per_second=int(peak * profile.achievable["compute"]),
        attention_flops_per_second=int(peak * profile.achievable["attention"]),
        bytes_per_second=int(profile.memory_bytes_per_second * profile.achievable["memory"]),
        launch_ns=profile.launch_ns,
    )


def op_ns(op: OpNode, reached: Rates) -> int:
    """Time of one op on the device; 0 for a view, which moves no data."""
    if op.is_view:
        return 0
    rate = reached.attention_flops_per_second if ATTENTION in op.target else reached.flops_per_second
    arithmetic = _divide_up(op.flops * NS_PER_SECOND, rate)
    return max(arithmetic, copy_ns(op.bytes_read + op.bytes_written, reached))


def copy_ns(num_bytes: int, reached: Rates) -> int:
    """Time to move bytes through the device's memory; count what is read and what is written."""
    return _divide_up(num_bytes * NS_PER_SECOND, reached.bytes_per_second)


def _divide_up(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
