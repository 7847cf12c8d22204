"""What holds for every model and plan: over seeded random models, cut at random."""

import random
from dataclasses import replace

import msgspec
import pytest

from autoshard.ir import ModelGraph
from autoshard.plan import Decisions
from autoshard.request import Question, Request, resolve
from autoshard.simulate import KINDS, advance, profile_step, simulate, step_events
from tests.graphs import Mod, Par, build, mod
from tests.simulate.measured import decisions

SEEDS = range(40)


def _module(rng: random.Random, name: str, depth: int) -> Mod:
    children = [_module(rng, str(index), depth - 1) for index in range(rng.randint(1, 3))] if depth else []
    params = {
        f"p{index}": Par(
            shape=(rng.choice((1, 3, 17, 64, 101)), rng.choice((1, 8, 31))), requires_grad=rng.random() < 0.8
        )
        for index in range(rng.randint(0 if children else 1, 2))
    }
    options = {"act": rng.choice((64, 640)), "saved": rng.choice((0, 256)), "temp": rng.choice((0, 4096))}
    return mod(name, *children, params=params, takes_grad=rng.random() < 0.9, **options)


def _world(seed: int, rename: str = "") -> tuple[ModelGraph, Decisions, Question]:
    rng = random.Random(seed)
    children = [_module(rng, f"{rename}{index}", rng.randint(0, 2)) for index in range(rng.randint(1, 4))]
    params = {"root": Par(shape=(rng.choice((5, 64)), 7))} if rng.random() < 0.5 else {}
    graph = build(mod("", *children, params=params))
    post_order = _post_order("", mod("", *children))
    units = [((fqn,), rng.random() < 0.7) for fqn in post_order[:-1] if rng.random() < 0.5]
    plan = decisions(
        *units,
        shards=rng.choice((1, 2, 4, 8, 64)),
        replicas=rng.choice((1, 2)),
        root_reshard=rng.random() < 0.3,
        **rng.choice(({}, {"param": "bfloat16", "reduce": "float32"}, {"param": "bfloat16"})),
        reduce_unused=rng.random() < 0.2,
    )
    optimizer = rng.choice(("adamw", "sgd", "sgd-momentum"))
    return graph, plan, resolve(Request(device="h100-80gb", devices=plan.num_devices, optimizer=optimizer))


def _post_order(path: str, module: Mod) -> list[str]:
    names = [_post_order(f"{path}.{child.name}".strip("."), child) for child in module.children]
    return [name for below in names for name in below] + [path]


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_freed_twice_and_everything_is_freed(seed: int) -> None:
    graph, plan, question = _world(seed)
    timeline = simulate(graph, plan, question)
    for entry in timeline.entries:
        assert min(entry.state.live) >= 0, entry
        assert entry.state.high >= sum(entry.state.live)
        assert sum(entry.state.high_live) == entry.state.high
    outputs = timeline.setup.profile.between[-1]
    first, last = timeline.start.live, timeline.entries[-1].state.live
    assert [left for kind, left in zip(KINDS, last, strict=True) if kind != "activations"] == [
        left for kind, left in zip(KINDS, first, strict=True) if kind != "activations"
    ]
    assert last[KINDS.index("activations")] == outputs
    assert not timeline.entries[-1].state.arrivals
    assert not timeline.entries[-1].state.inputs


@pytest.mark.parametrize("seed", SEEDS)
def test_clocks_never_run_back_and_the_step_is_no_shorter_than_its_ops(seed: int) -> None:
    graph, plan, question = _world(seed)
    timeline = simulate(graph, plan, question)
    for name in ("compute_ns", "host_ns", "gather_ns", "shard_ns", "replicate_ns", "exposed_ns"):
        values = [getattr(entry.state, name) for entry in timeline.entries]
        assert values == sorted(values)
    assert timeline.step_ns >= timeline.setup.profile.compute_ns + timeline.exposed_ns


@pytest.mark.parametrize("seed", SEEDS)
def test_each_gathered_unit_is_reduced_and_the_gradients_are_whole(seed: int) -> None:
    graph, plan, question = _world(seed)
    timeline = simulate(graph, plan, question)
    trained = {param.key: param for param in graph.params if param.gets_grad}
    expected = sum(
        gradient.sharded_bytes
        for unit in timeline.setup.units
        for key, gradient in unit.gradients
        if key in trained or plan.reduce_unused
    )
    finish = [entry for entry in timeline.entries if entry.event.phase == "backward"][-1]
    assert finish.state.live[KINDS.index("sharded_grads")] == expected
    assert finish.state.live[KINDS.index("unsharded_grads")] == 0
    assert finish.state.live[KINDS.index("unsharded_params")] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_names_of_modules_do_not_matter(seed: int) -> None:
    graph, plan, question = _world(seed)
    renamed, units, _ = _world(seed, rename="layer_")
    assert [u.modules for u in units.units] != [u.modules for u in plan.units] or len(plan.units) == 1
    first, second = simulate(graph, plan, question), simulate(renamed, units, question)
    assert [entry.state for entry in first.entries] == [entry.state for entry in second.entries]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_fold_without_states_between_finds_the_same_summits(seed: int) -> None:
    timeline = simulate(*_world(seed))
    assert [summit.phase for summit in timeline.summits] == ["forward", "backward", "optimizer"]
    for summit in timeline.summits:
        during = [entry for entry in timeline.entries if entry.event.phase == summit.phase]
        assert summit.high == max(entry.state.high for entry in during)
        assert summit.end_bytes == sum(during[-1].state.live)
    last, summit = timeline.entries[-1].state, timeline.summits[-1]
    assert timeline.end == msgspec.structs.replace(
        last, high=summit.high, high_live=summit.high_live, high_op=summit.high_op
    )
    highest = max(timeline.entries, key=lambda entry: entry.state.high)
    peak = max(timeline.summits, key=lambda summit: summit.high)
    assert (timeline.events[peak.event], peak.high_live, peak.high_op) == (
        highest.event,
        highest.state.high_live,
        highest.state.high_op,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_question_has_the_same_answer_with_and_without_a_profile(seed: int) -> None:
    graph, plan, question = _world(seed)
    profile = profile_step(graph, question)
    first = simulate(graph, plan, question, profile)
    assert first.entries == simulate(graph, plan, question).entries
    state, events = first.start, step_events(graph, plan, first.setup.units, profile)
    for entry, event in zip(first.entries, events, strict=True):
        state = advance(first.setup, state, event)
        assert state == entry.state


@pytest.mark.parametrize("seed", SEEDS)
def test_advance_is_monotone_in_every_clock(seed: int) -> None:
    """Later streams never make anything earlier: what the search's dominance rests on."""
    graph, plan, question = _world(seed)
    timeline = simulate(graph, plan, question)
    rng = random.Random(seed)
    clocks = ("compute_ns", "host_ns", "gather_ns", "shard_ns", "replicate_ns", "copied_ns", "reduced_ns")
    states = [timeline.start, *(entry.state for entry in timeline.entries)]
    for state, entry in zip(states, timeline.entries, strict=False):
        late = {name: getattr(state, name) + rng.choice((0, 1, 10**6)) for name in clocks}
        later = advance(timeline.setup, msgspec.structs.replace(state, **late), entry.event)
        assert all(getattr(later, name) >= getattr(entry.state, name) for name in clocks)
        assert (later.live, later.high) == (entry.state.live, entry.state.high)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_shards_never_need_more_between_steps(seed: int) -> None:
    """Padding never outweighs sharding, because it is at most one row for each shard."""
    graph, plan, question = _world(seed)
    mesh = (msgspec.structs.replace(plan.mesh[-1], size=2 * plan.num_shards),)
    more = msgspec.structs.replace(plan, mesh=mesh)
    assert simulate(graph, more, question).steady_bytes <= simulate(graph, plan, question).steady_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_keeping_a_unit_never_adds_a_collective(seed: int) -> None:
    graph, plan, question = _world(seed)
    kept = msgspec.structs.replace(
        plan, units=tuple(msgspec.structs.replace(unit, reshard=False) for unit in plan.units)
    )
    assert len(list(simulate(graph, kept, question).collectives())) <= len(
        list(simulate(graph, plan, question).collectives())
    )


def test_a_larger_input_only_adds_activations() -> None:
    graph, plan, question = _world(3)
    region = graph.regions[0]
    storages = tuple(
        replace(storage, nbytes=2 * storage.nbytes) if storage.kind in ("activation", "temporary") else storage
        for storage in region.storages
    )
    larger = replace(graph, regions=(replace(region, storages=storages),))
    first, second = simulate(graph, plan, question), simulate(larger, plan, question)
    assert second.steady_bytes == first.steady_bytes
    assert second.peak_bytes > first.peak_bytes
