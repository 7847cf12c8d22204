"""Bytes and clocks of small worlds, with sums written out by hand from FSDP2's rules; sizes are primes."""

import time
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from autoshard.errors import GraphError, RequestError
from autoshard.hardware import DeviceProfile, Link, Protocol, load_profile
from autoshard.ir import ModelGraph
from autoshard.plan import Axis, Decisions, Method, Precision
from autoshard.request import Question, Request, resolve
from autoshard.simulate import KINDS, Collective, Timeline, expected_collectives, profile_step, simulate
from tests.graphs import Par, build, chain, decoder, mod
from tests.simulate.measured import decisions

UNIT_RATES: DeviceProfile = msgspec.structs.replace(
    load_profile("h100-80gb"),
    flops_per_second={"float32": 10**9},
    memory_bytes_per_second=10**9,
    achievable={"attention": 1.0, "compute": 1.0, "memory": 1.0, "link": 1.0},
    within_node=Link(bytes_per_second=10**9),
    protocols=(
        Protocol(
            name="one",
            algorithm="ring",
            serves=("all-gather", "reduce-scatter", "all-reduce"),
            start_ns=7,
            hop_ns=0,
            network_hop_ns=0,
            bandwidth=1.0,
        ),
    ),
    launch_ns=0,
    unit_host_ns=0,
)
"""One operation and one byte per nanosecond everywhere, a collective starts in 7 ns, the host is free."""


def _question(devices: int, optimizer: str = "sgd") -> Question:
    return resolve(Request(device="h100-80gb", devices=devices, precision="fp32", optimizer=optimizer))


def question_on(profile: DeviceProfile, devices: int) -> Question:
    """A question on a device profile that is not one of the files."""
    return replace(_question(devices), profile=profile)


def _simulate(graph: ModelGraph, plan: Decisions, optimizer: str = "sgd") -> Timeline:
    return simulate(graph, plan, _question(plan.num_devices, optimizer))


def _alive(timeline: Timeline, *kinds: str) -> list[tuple[str, int, int]]:
    """(kind of event, most alive during it, alive after it) for some kinds of events."""
    return [
        (entry.event.kind, entry.state.high, sum(entry.state.live))
        for entry in timeline.entries
        if entry.event.kind in kinds
    ]


class TestMemory:
    """Three units of 97, 211 and 151 fp32 elements on 4 devices; each op's output has 64 bytes and is kept."""

    H = 100 + 212 + 152  # padded to multiples of 4 elements, a fourth of it, 4 bytes each
    S0, S1, S2 = 400, 848, 608
    INPUTS = 4 * 8

    @pytest.fixture
    def timeline(self) -> Timeline:
        return _simulate(build(chain(97, 211, 151)), decisions(("0",), ("1",), ("2",), shards=4))

    def test_steady(self, timeline: Timeline) -> None:
        assert timeline.steady_bytes == self.H

    def test_forward_keeps_a_buffer_until_the_next_copy_out_is_done(self, timeline: Timeline) -> None:
        base = self.H + self.INPUTS
        found = [entry for entry in _alive(timeline, "gather", "copy out", "flush") if entry][:7]
        assert found == [
            ("gather", base + self.S0, base + self.S0),
            ("copy out", base + 2 * self.S0, base + 2 * self.S0),
            ("gather", base + 64 + self.S0 + self.S1, base + 64 + self.S0 + self.S1),
            ("copy out", base + 64 + self.S0 + 2 * self.S1, base + 64 + 2 * self.S1),
            ("gather", base + 128 + self.S1 + self.S2, base + 128 + self.S1 + self.S2),
            ("copy out", base + 128 + self.S1 + 2 * self.S2, base + 128 + 2 * self.S2),
            ("flush", base + 192 + self.S2, base + 192),
        ]
        assert timeline.phase_peak_bytes("forward") == base + 128 + self.S1 + 2 * self.S2

    def test_backward(self, timeline: Timeline) -> None:
        """Unit 2 of 604 gradient bytes: its reduce-scatter's input is 608, its shard of gradients 152."""
        base = self.H + self.INPUTS
        reduces = [entry for entry in timeline.entries if entry.event.kind == "reduce"]
        assert [timeline.unit_name(entry.event) for entry in reduces] == ["2", "1", "0"]
        # The last gradient is still referenced while the shard is allocated; here it is the only one. Alive besides:
        # unit 1's prefetched buffer, the gradient of its output, and its input, which it saved.
        rest = base + self.S1 + 64 + 64
        assert reduces[0].state.high == rest + 604 + 608 + 152
        assert sum(reduces[0].state.live) == rest + 608 + 152
        rest = base + 152 + self.S0 + 64
        assert reduces[1].state.high == rest + 844 + 848 + 212
        released = [entry for entry in timeline.entries if entry.event.kind == "release"]
        assert [before.high - sum(before.live) for before in (entry.state for entry in released)] == [608, 848, 400]

    def test_after_backward_the_shards_of_gradients_are_left(self, timeline: Timeline) -> None:
        assert timeline.phase_end_bytes("backward") == 2 * self.H + self.INPUTS
        assert timeline.phase_end_bytes("optimizer") == self.H + self.INPUTS

    def test_the_peak_is_the_sum_of_its_kinds(self, timeline: Timeline) -> None:
        assert sum(timeline.by_kind.values()) == timeline.peak_bytes
        assert timeline.by_kind["sharded_params"] == self.H
        assert timeline.peak_at.startswith("backward, ")

    def test_collectives(self, timeline: Timeline) -> None:
        """Without parameters of its own the root takes no part; unit 0 is reduced at the end."""
        assert list(timeline.collectives()) == [
            Collective(kind=kind, unit=unit, phase=phase, num_bytes=size, dtype="float32")
            for kind, unit, phase, size in [
                ("all_gather", "0", "forward", self.S0),
                ("all_gather", "1", "forward", self.S1),
                ("all_gather", "2", "forward", self.S2),
                ("all_gather", "2", "backward", self.S2),
                ("all_gather", "1", "backward", self.S1),
                ("reduce_scatter", "2", "backward", self.S2),
                ("all_gather", "0", "backward", self.S0),
                ("reduce_scatter", "1", "backward", self.S1),
                ("reduce_scatter", "0", "backward", self.S0),
            ]
        ]


def test_bf16_compute_and_fp32_reduction() -> None:
    """151 elements on 4 devices, 152 padded: 304 bytes gathered from a copy of 76, 302 of gradient, 608 reduced."""
    plan = decisions(("0",), shards=4, param="bfloat16", reduce="float32")
    timeline = _simulate(build(chain(151)), plan)
    gather = next(entry for entry in timeline.entries if entry.event.kind == "gather")
    assert gather.state.high == 152 + 32 + 76 + 304
    reduce = next(entry for entry in timeline.entries if entry.event.kind == "reduce")
    before = sum(reduce.state.live) - 608 - 152 + 302
    assert reduce.state.high == before + 608 + 152  # the output is in the stored dtype already, so nothing is cast
    kinds = dict(zip(KINDS, reduce.state.live, strict=True))
    assert kinds["sharded_grads"] == 152
    assert kinds["reduce_scatter_buffers"] == 608
    assert [found.dtype for found in timeline.collectives()] == ["bfloat16", "bfloat16", "float32"]


def test_replicas_add_an_all_reduce_and_keep_its_buffer_when_the_result_is_cast() -> None:
    plan = decisions(("0",), ("1",), shards=4, replicas=2, reduce="bfloat16")
    timeline = _simulate(build(chain(151, 97)), plan)
    found = [(c.kind, c.unit, c.num_bytes) for c in timeline.collectives() if c.kind != "all_gather"]
    assert found == [
        ("reduce_scatter", "1", 200),
        ("all_reduce", "1", 50),
        ("reduce_scatter", "0", 304),
        ("all_reduce", "0", 76),
    ]
    finish = next(entry for entry in timeline.entries if entry.event.kind == "finish")
    kinds = dict(zip(KINDS, finish.state.live, strict=True))
    assert kinds["reduce_scatter_buffers"] == 304 + 50 + 76


def test_fewer_rows_than_shards_inflate_and_another_dim_does_not() -> None:
    graph = build(mod("", mod("a", weight=Par(shape=(3, 8)))))
    assert _simulate(graph, decisions(("a",), shards=8)).steady_bytes == 8 * 4
    dim1 = _simulate(graph, decisions(("a",), shards=8, shard_dims={"a.weight": 1}))
    assert dim1.steady_bytes == 3 * 4
    copy_out = next(entry for entry in dim1.entries if entry.event.kind == "copy out")
    assert copy_out.state.high - sum(copy_out.state.live) == 96


@pytest.mark.parametrize(
    ("optimizer", "state", "temporary"),
    [("sgd", 0, 0), ("sgd-momentum", 464, 0), ("adamw", 928, 464)],
)
def test_optimizer_on_an_accelerator(optimizer: str, state: int, temporary: int) -> None:
    plan = decisions(("0",), ("1",), ("2",), shards=4)
    timeline = _simulate(build(chain(97, 211, 151)), plan, optimizer)
    assert timeline.steady_bytes == 464 + state
    step = next(entry for entry in timeline.entries if entry.event.kind == "optimizer")
    assert step.state.high - sum(step.state.live) == temporary


def test_adamw_on_a_cpu_goes_parameter_by_parameter() -> None:
    plan = decisions(("0",), ("1",), ("2",), shards=4)
    question = resolve(Request(device="cpu", devices=4))
    timeline = simulate(build(chain(97, 211, 151)), plan, question)
    assert timeline.steady_bytes == 464 * 3 + 3 * 4
    step = next(entry for entry in timeline.entries if entry.event.kind == "optimizer")
    assert step.state.high - sum(step.state.live) == max(200, 2 * 212 + 100, 2 * 152 + 212)


class TestClocks:
    """Two units of 10 and 14 elements on 2 devices at one byte and one operation per nanosecond."""

    @pytest.fixture
    def timeline(self) -> Timeline:
        plan = decisions(("0",), ("1",), shards=2)
        return simulate(build(chain(10, 14)), plan, question_on(UNIT_RATES, 2))

    def test_forward(self, timeline: Timeline) -> None:
        copied_in = 20 + 20  # unit 0 has 40 bytes: its half is read and written
        gathered = copied_in + 7 + 20  # and the other half goes over the wire
        copied = gathered + 80
        ran = copied + max(80, 64 + 40 + 64)  # 2 * 4 tokens * 10 operations, or input, weight and output
        copied_1 = max(ran, max(gathered, copied_in + 56) + 7 + 28) + 112
        ran_1 = copied_1 + max(112, 64 + 56 + 64)
        loss = ran_1 + 64 + 4
        clocks = [e.state.compute_ns for e in timeline.entries if e.event.phase == "forward"]
        assert sorted(set(clocks)) == [0, copied, ran, copied_1, ran_1, loss] == [0, 147, 315, 427, 611, 679]

    def test_step(self, timeline: Timeline) -> None:
        loss = 679 + 68
        gather_1 = 427 + 56 + 7 + 28  # may start when the last copy-out of forward is done
        copied_1 = max(loss, gather_1) + 112
        gather_0 = copied_1 + 40 + 7 + 20  # waits for the copy-out just done
        ran_1 = copied_1 + max(2 * 112, 184)
        packed_1 = ran_1 + 56 + 56
        reduced_1 = max(packed_1, gather_0) + 7 + 28
        copied_0 = max(packed_1, gather_0) + 80
        ran_0 = copied_0 + max(2 * 80, 168)
        packed_0 = max(ran_0, reduced_1) + 40 + 40
        reduced_0 = max(packed_0, reduced_1) + 7 + 20
        sgd = 3 * (20 + 28)
        assert timeline.step_ns == reduced_0 + sgd == 1694
        assert timeline.exposed_ns == 40 + 27 + 27  # the first copy-in and all-gather, the last reduce-scatter

    def test_reduce_scatter_and_all_gather_share_the_communicator(self, timeline: Timeline) -> None:
        starts = [entry.state.shard_ns for entry in timeline.entries if entry.event.kind in ("gather", "reduce")]
        assert all(earlier < later for earlier, later in pairwise(starts))

    def test_a_slow_host_holds_the_device_back(self) -> None:
        slow = msgspec.structs.replace(UNIT_RATES, launch_ns=10_000, unit_host_ns=1_000)
        timeline = simulate(build(chain(10, 14)), decisions(("0",), ("1",), shards=2), question_on(slow, 2))
        assert timeline.step_ns == 6 * 10_000 + 4 * 1_000 + 80 + 27 + 144
        # The device waits for the host all along. What it waits for communication is what the host finds not done when
        # it comes there: copy-in and gather of unit 0, of unit 1 in both directions, and the last reduce-scatter.
        assert timeline.exposed_ns == (40 + 27) + 2 * (56 + 35) + 27

    def test_keeping_the_last_unit_saves_its_all_gather(self, timeline: Timeline) -> None:
        plan = decisions(("0",), (("1",), False), shards=2)
        kept = simulate(build(chain(10, 14)), plan, question_on(UNIT_RATES, 2))
        assert timeline.step_ns - kept.step_ns == 112
        assert len(list(timeline.collectives())) - len(list(kept.collectives())) == 1


class TestRefusals:
    GRAPH = build(chain(10, 14))

    def test_offload(self) -> None:
        with pytest.raises(RequestError, match="offload"):
            _simulate(self.GRAPH, decisions(("0",), offload="cpu"))

    def test_casts_of_outputs(self) -> None:
        plan = msgspec.structs.replace(decisions(("0",)), precision=Precision(output="float32"))
        with pytest.raises(RequestError, match="outputs of units"):
            _simulate(self.GRAPH, plan)

    def test_no_root(self) -> None:
        plan = msgspec.structs.replace(decisions(("0",)), units=decisions(("0",)).units[:1])
        with pytest.raises(RequestError, match="the root as the last unit"):
            _simulate(self.GRAPH, plan)

    def test_other_axes(self) -> None:
        plan = msgspec.structs.replace(decisions(("0",)), mesh=(Axis(name="tp", size=2, role="tensor"),))
        with pytest.raises(RequestError, match="shard axis"):
            _simulate(self.GRAPH, plan)

    def test_a_graph_without_ops(self) -> None:
        graph = ModelGraph(**{name: getattr(self.GRAPH, name) for name in ModelGraph.__slots__} | {"regions": ()})  # type: ignore[arg-type]
        with pytest.raises(GraphError, match="no step to simulate"):
            profile_step(graph, _question(2))


def test_decisions_without_effect_on_a_step_change_nothing() -> None:
    graph = build(decoder())
    plan = decisions(("embed",), ("layers.0",), ("head",))
    question = _question(8)
    other = msgspec.structs.replace(plan, methods=(Method(module="layers.0", method="run"),), rebuilt_buffers=("x",))
    first = simulate(graph, plan, question).projection(question)
    assert simulate(graph, other, question).projection(question) == first


def test_projection_counts_and_sums_the_collectives() -> None:
    graph = build(decoder())
    plan = decisions(("embed",), ("layers.0",), (("norm", "head"), False))
    question = _question(8, "adamw")
    timeline = simulate(graph, plan, question)
    projection, found = timeline.projection(question), expected_collectives(graph, plan, question)
    gathers = [c.num_bytes for c in found if c.kind == "all_gather"]
    assert (projection.num_all_gathers, projection.all_gather_bytes) == (len(gathers), sum(gathers))
    assert projection.num_reduce_scatters == 4
    assert projection.num_all_reduces == 0
    assert projection.allowed_bytes == question.allowed_bytes
    assert projection.peak_bytes == sum(projection.by_kind.values())


def test_a_replay_takes_milliseconds() -> None:
    """The search replays thousands of plans: a decoder of 32 blocks in well under 30 ms of CPU time."""
    graph = build(decoder(num_layers=32))
    plan = decisions(("embed",), *((f"layers.{index}",) for index in range(32)), (("norm", "head"), False))
    question = _question(8, "adamw")
    profile = profile_step(graph, question)
    times = []
    for _ in range(5):
        before = time.process_time()
        simulate(graph, plan, question, profile)
        times.append(time.process_time() - before)
    assert min(times) < 0.03
