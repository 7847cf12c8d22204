"""Where the bytes of a step go: phases, the parts of the peak, the step in stretches."""

from collections import Counter

import pytest

from autoshard.request import Request, resolve
from autoshard.simulate import KINDS, peak_parts, phase_peaks, profile_step, simulate, stretches, timeline_record
from autoshard.simulate.profile import alive_activations
from autoshard.simulate.recompute import recomputed
from tests.graphs import build, chain, decoder
from tests.simulate.measured import decisions
from tests.simulate.test_laws import SEEDS, _world

DECODER = (("embed",), ("layers.0",), ("layers.1",), (("norm", "head"), False))


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_are_the_peak_and_each_kind_of_it(seed: int) -> None:
    graph, plan, question = _world(seed)
    timeline = simulate(graph, plan, question)
    for limit in (1, 4, 100):
        parts = peak_parts(timeline, graph, limit)
        assert sum(part.num_bytes for part in parts) == timeline.peak_bytes
        kinds: Counter[str] = Counter()
        for part in parts:
            assert part.num_bytes > 0
            kinds[part.kind] += part.num_bytes
        assert kinds == timeline.by_kind
        assert [part.num_bytes for part in parts[:limit]] == sorted((p.num_bytes for p in parts[:limit]), reverse=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_phases_and_stretches_reach_the_peak(seed: int) -> None:
    graph, plan, question = _world(seed)
    timeline = simulate(graph, plan, question)
    phases, course = phase_peaks(timeline), stretches(timeline)
    assert [phase.phase for phase in phases] == ["forward", "backward", "optimizer"]
    assert max(phase.peak_bytes for phase in phases) == timeline.peak_bytes
    assert timeline.peak_at in {phase.peak_at for phase in phases}
    assert all(sum(phase.by_kind.values()) == phase.peak_bytes for phase in phases)
    for phase in phases:
        assert max(each.peak_bytes for each in course if each.phase == phase.phase) == phase.peak_bytes
    ends = [each.end_ns for each in course]
    assert ends == sorted(ends)
    assert ends[-1] == timeline.step_ns
    assert len(course) <= 24 + 3


def test_activations_of_a_decoder_by_module() -> None:
    """By hand: what each attention saves lives from its forward to the peak in backward."""
    graph = build(decoder(num_layers=2))
    plan = decisions(*DECODER, shards=8)
    timeline = simulate(graph, plan, resolve(Request(device="h100-80gb", devices=8, precision="fp32")))
    made = {part.where: part.num_bytes for part in peak_parts(timeline, graph) if part.kind == "activations"}
    root, num_forward = graph.root, len(graph.root.forward)
    event = max(timeline.summits, key=lambda summit: summit.high)
    expected: Counter[str] = Counter()
    for storage in root.storages:
        if storage.kind not in ("activation", "temporary", "output"):
            continue
        first = storage.born.index + num_forward * (storage.born.phase == "backward")
        last = storage.dies.index + num_forward * (storage.dies.phase == "backward")
        if storage.dies.phase == "caller":
            last = 10**9
        if first <= event.high_op <= last:
            ops = (*root.forward, *root.backward)
            expected[ops[first].module.replace("layers.0", "layers.*").replace("layers.1", "layers.*")] += (
                storage.nbytes
            )
    assert made == expected
    assert any("*" in where for where in made)


@pytest.mark.parametrize("recompute", [(), ("layers.0",), ("layers.0", "layers.1")])
def test_alive_activations_are_the_profile_at_every_moment(recompute: tuple[str, ...]) -> None:
    graph = build(decoder(num_layers=2))
    question = resolve(Request(device="h100-80gb", devices=8))
    profile, rewritten = profile_step(graph, question, recompute), recomputed(graph, recompute)
    for op in range(profile.num_ops):
        alive = sorted(alive_activations(graph, recompute, op=op))
        assert sum(size for _, size in alive) == profile.during[op]
        assert alive == sorted(alive_activations(rewritten, op=op))
    for position in range(profile.num_ops + 1):
        alive = sorted(alive_activations(graph, recompute, position=position))
        assert sum(size for _, size in alive) == profile.between[position]
        assert alive == sorted(alive_activations(rewritten, position=position))


def test_unsharded_parameters_are_told_by_unit() -> None:
    graph = build(chain(10, 14))
    plan = decisions((("0",), False), (("1",), False), shards=2)
    timeline = simulate(graph, plan, resolve(Request(device="cpu", devices=2)))
    made = {part.where: part.num_bytes for part in peak_parts(timeline, graph) if part.kind == "unsharded_params"}
    assert sum(made.values()) == timeline.by_kind["unsharded_params"]
    assert set(made) <= {"0", "1", "(root)"}


def test_the_record_holds_every_event_and_collective() -> None:
    graph = build(decoder(num_layers=2))
    plan = decisions(*DECODER, shards=8)
    timeline = simulate(graph, plan, resolve(Request(device="h100-80gb", devices=8)))
    record = timeline_record(timeline)
    assert len(record["events"]) == len(timeline.events)
    assert max(event["high_bytes"] for event in record["events"]) == record["peak_bytes"] == timeline.peak_bytes
    assert record["kinds"] == list(KINDS)
    assert sum(record["start_bytes"]) == sum(timeline.start.live)
    assert {"kind": "all_gather", "unit": "embed", "phase": "forward"}.items() <= record["collectives"][0].items()
    assert len(record["collectives"]) == len(list(timeline.collectives()))
    assert record == timeline_record(simulate(graph, plan, resolve(Request(device="h100-80gb", devices=8))))
