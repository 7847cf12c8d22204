"""Timings made from known figures give these figures back."""

import math
from typing import Any

import msgspec
import pytest

from autoshard.cost import Group, all_gather_ns, all_reduce_ns, reduce_scatter_ns
from autoshard.hardware import DeviceProfile, Machine, Sample, calibrated_profile, encode_profile, load_profile
from autoshard.hardware.fit import fit_line, fit_rate

LAUNCH, HOST = 3_000, 70_000
GFLOPS = {"matmul float32": 40, "matmul bfloat16": 80, "attention float32": 10}
START = {"all-gather": (100_000, 20_000), "reduce-scatter": (50_000, 30_000), "all-reduce": (10_000, 40_000)}
BYTES_PER_US = {"all-gather": 1_000, "reduce-scatter": 500, "all-reduce": 800}
MACHINE = Machine(
    name="mine",
    description="one process on a test",
    memory_bytes=8 * 2**30,
    torch="2.13.0",
    backend="gloo",
    num_devices=4,
    devices_per_node=4,
    num_threads=1,
)


def _samples(groups: tuple[int, ...] = (2, 4), host_ns: int = HOST) -> list[Sample]:
    found = [Sample(figure="kernel", work=count, ns=count * LAUNCH) for count in (100, 200)]
    found += [Sample(figure="memory", work=size, ns=LAUNCH + size // 8) for size in (80_000, 8_000_000)]
    for figure, rate in GFLOPS.items():
        found += [Sample(figure=figure, work=rate * ns, ns=LAUNCH + ns) for ns in (10_000, 1_000_000)]
    for figure, (start, hop) in START.items():
        passes = 2 if figure == "all-reduce" else 1
        for ranks in groups:
            alpha = start + passes * (ranks - 1) * hop
            for us in (10, 100, 10_000):
                work = us * BYTES_PER_US[figure]
                found.append(Sample(figure=figure, work=work, ns=alpha + us * 1000, num_ranks=ranks))
    gather, scatter = 100_000 + 3 * 20_000, 50_000 + 3 * 30_000
    for count in (2, 5):
        plain = 500_000 + count * 40_000
        found.append(Sample(figure="units plain", work=count, ns=plain))
        found.append(
            Sample(figure="units kept", work=count, ns=plain + count * (2 * host_ns + gather + scatter + 9_000))
        )
        resharded = plain + count * (2 * host_ns + 2 * (gather + 9_000) + scatter)
        found.append(Sample(figure="units resharded", work=count, ns=resharded))
    return found


def _profile(**options: Any) -> DeviceProfile:
    return calibrated_profile(_samples(**options), load_profile("cpu"), MACHINE)


def test_known_figures_are_found_again() -> None:
    found = _profile()
    assert found.launch_ns == LAUNCH
    assert found.memory_bytes_per_second == pytest.approx(8 * 10**9, rel=1e-6)
    compute, attention = found.achievable["compute"], found.achievable["attention"]
    assert found.flops_per_second["float32"] * compute == pytest.approx(40 * 10**9, rel=1e-5)
    assert found.flops_per_second["bfloat16"] * compute == pytest.approx(80 * 10**9, rel=1e-5)
    assert found.flops_per_second["float32"] * attention == pytest.approx(10 * 10**9, rel=1e-5)
    assert found.unit_host_ns == HOST
    assert found.calibration is not None
    assert max(fit.largest_error for fit in found.calibration.fits) < 1e-3


def test_collectives_cost_what_was_timed_with_what_fsdp2_adds_to_an_all_gather() -> None:
    found = _profile()
    for ranks in (2, 4):
        group, size = Group.of(found, ranks), 4_000_000
        wire = size * (ranks - 1) // ranks
        gather = 9_000 + 100_000 + (ranks - 1) * 20_000 + wire // BYTES_PER_US["all-gather"] * 1000
        scatter = 50_000 + (ranks - 1) * 30_000 + wire // BYTES_PER_US["reduce-scatter"] * 1000
        reduce = 10_000 + 2 * (ranks - 1) * 40_000 + 2 * wire // BYTES_PER_US["all-reduce"] * 1000
        assert all_gather_ns(size, group) == pytest.approx(gather, rel=1e-4)
        assert reduce_scatter_ns(size, group) == pytest.approx(scatter, rel=1e-4)
        assert all_reduce_ns(size, group) == pytest.approx(reduce, rel=1e-4)


def test_from_one_group_the_start_grows_with_the_hops() -> None:
    found = _profile(groups=(4,))
    scatter = next(way for way in found.protocols if way.serves == ("reduce-scatter",))
    assert (scatter.start_ns, scatter.hop_ns) == (0, pytest.approx((50_000 + 3 * 30_000) / 3, rel=1e-3))


def test_attention_faster_than_products_keeps_fractions_in_their_range() -> None:
    samples = [
        msgspec.structs.replace(each, work=10 * each.work) if each.figure.startswith("attention") else each
        for each in _samples()
    ]
    found = calibrated_profile(samples, load_profile("cpu"), MACHINE)
    assert found.achievable["attention"] == 1.0
    assert found.flops_per_second["float32"] * found.achievable["compute"] == pytest.approx(40 * 10**9, rel=1e-5)


def test_groups_on_several_nodes_give_the_network() -> None:
    slow = [
        Sample(figure=figure, work=us * 100, ns=400_000 + us * 1000, num_ranks=8, num_nodes=2)
        for figure in START
        for us in (10, 100, 10_000)
    ]
    found = calibrated_profile([*_samples(), *slow], load_profile("cpu"), MACHINE)
    assert found.between_nodes.bytes_per_second == pytest.approx(100 * 10**6, rel=1e-3)
    assert Group.of(found, 8).bytes_per_second == pytest.approx(100 * 10**6, rel=1e-3)
    assert found.sources["between_nodes.card_bytes_per_second"].startswith("measured on")


def test_what_was_not_measured_is_said() -> None:
    found = _profile()
    assert found.sources["between_nodes.card_bytes_per_second"].startswith("taken over from the profile cpu")
    assert all("taken over" in part.source for part in found.headroom)
    assert found.headroom_bytes < found.memory_bytes
    assert found.overlap == "none"


def test_the_file_is_read_back(tmp_path: Any) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(encode_profile(_profile()))
    assert load_profile(str(path)) == _profile()


def test_hooks_cheaper_than_nothing_are_free() -> None:
    assert _profile(host_ns=-80_000).unit_host_ns == 0


def test_a_line_is_the_least_squares_of_relative_errors() -> None:
    points = [(1, 110), (10, 190), (100, 1_300)]
    line = fit_line("x", [Sample(figure="x", work=work, ns=ns) for work, ns in points])

    def loss(start: float, slope: float) -> float:
        return sum(((start + slope * work) / ns - 1) ** 2 for work, ns in points)

    best = loss(line.start_ns, line.ns_per_work)
    for step in (-0.01, 0.01):
        assert loss(line.start_ns * (1 + step), line.ns_per_work) > best
        assert loss(line.start_ns, line.ns_per_work * (1 + step)) > best
    errors = sorted(abs((line.start_ns + line.ns_per_work * work) / ns - 1) for work, ns in points)
    assert line.fit.num_points == 3
    assert (line.fit.median_error, line.fit.largest_error) == (round(errors[1], 4), round(errors[2], 4))


def test_a_start_below_nothing_is_nothing() -> None:
    line = fit_line("x", [Sample(figure="x", work=work, ns=work * work) for work in (10, 20, 40)])
    assert line.start_ns == 0
    assert math.isclose(line.ns_per_work, (1 / 10 + 1 / 20 + 1 / 40) / (1 / 100 + 1 / 400 + 1 / 1600))


def test_what_may_be_flat_takes_no_time_where_timings_fall() -> None:
    samples = [Sample(figure="x", work=work, ns=ns) for work, ns in [(1, 120), (9, 100)]]
    line = fit_line("x", samples, may_be_flat=True)
    assert line.ns_per_work == 0
    assert math.isclose(line.start_ns, (1 / 120 + 1 / 100) / (1 / 120**2 + 1 / 100**2))


@pytest.mark.parametrize("points", [[(5, 10)], [(5, 10), (5, 12)], [(1, 10_000), (100, 10)]])
def test_timings_without_a_rate_are_refused(points: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="x: "):
        fit_line("x", [Sample(figure="x", work=work, ns=ns) for work, ns in points])


def test_a_start_longer_than_the_timings_is_refused() -> None:
    with pytest.raises(ValueError, match="leave nothing"):
        fit_rate("x", [Sample(figure="x", work=5, ns=10)], start_ns=20)
