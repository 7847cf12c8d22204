"""Roofline by hand."""

from dataclasses import replace

from autoshard.cost import Rates, copy_ns, op_ns, rates
from autoshard.hardware import load_profile
from autoshard.ir import OpNode

SLOW = Rates(
    flops_per_second=3_000_000_000,
    attention_flops_per_second=2_000_000_000,
    bytes_per_second=7_000_000_000,
    launch_ns=11,
)
OP = OpNode(target="aten.mm.default", module="m", inputs=(), outputs=(), flops=31, bytes_read=13, bytes_written=17)


def test_arithmetic_bound() -> None:
    # 31 flops at 3 per ns are 10 1/3 ns; 30 bytes at 7 per ns are less.
    assert op_ns(OP, SLOW) == 11


def test_fused_attention_has_a_rate_of_its_own() -> None:
    # 31 flops at 2 per ns.
    assert op_ns(replace(OP, target="aten._scaled_dot_product_flash_attention.default"), SLOW) == 16
    assert op_ns(replace(OP, target="aten._efficient_attention_forward.default"), SLOW) == 16


def test_memory_bound() -> None:
    # 13 + 59 bytes at 7 per ns are 10 2/7 ns; 5 flops at 3 per ns are less.
    assert op_ns(replace(OP, flops=5, bytes_written=59), SLOW) == 11


def test_a_view_takes_no_time() -> None:
    assert op_ns(replace(OP, is_view=True), SLOW) == 0


def test_copy_is_rounded_up() -> None:
    assert copy_ns(14, SLOW) == 2
    assert copy_ns(15, SLOW) == 3


def test_rates_are_peaks_times_what_is_achieved() -> None:
    h100 = load_profile("h100-80gb")
    found = rates(h100, "bfloat16")
    assert found.flops_per_second == 989_400_000_000_000 // 2
    assert found.attention_flops_per_second == 989_400_000_000_000 * 35 // 100
    assert found.bytes_per_second == 3_350_000_000_000 * 8 // 10
    assert rates(h100, "float8_e4m3fn") == rates(h100, "float32")
