"""The search: what it chooses on small worlds, that it never loses to a baseline, what it says if nothing fits."""

import functools
import itertools
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor, nn

from autoshard.analysis import analyze
from autoshard.capture import capture
from autoshard.errors import InfeasibleBudgetError, NoLegalUnitError
from autoshard.ir import ModelGraph
from autoshard.planner import Found, baselines, search
from autoshard.request import Question, Request, resolve
from autoshard.simulate import profile_step, simulate
from autoshard.verify import verify_plan
from tests.graphs import Mod, Par, build, decoder, mod

LOOSE = 2**30


def _question(memory: int = LOOSE, **options: object) -> Question:
    question = resolve(Request(device="cpu", devices=4, memory=LOOSE, **options))  # type: ignore[arg-type]
    return replace(question, allowed_bytes=memory)


def _search(graph: ModelGraph, question: Question) -> Found:
    analysis = analyze(graph, num_shards=question.num_shards)
    legal = [
        base
        for base in baselines(graph, analysis, question)
        if not any(d.severity == "error" for d in verify_plan(base.decisions, graph, analysis))
    ]
    return search(graph, analysis, question, profile_step(graph, question), legal)


def test_where_the_host_takes_longest_there_is_one_unit() -> None:
    found = _search(build(decoder(num_layers=3, hidden=8)), _question())
    assert [unit.modules for unit in found.decisions.units] == [("",)]
    assert found.optimal.status == "proved"


def test_with_little_memory_each_block_is_a_unit() -> None:
    graph = build(decoder(num_layers=8, hidden=32))
    least = _search(graph, _question(objective="memory"))
    modules = {module for unit in least.decisions.units for module in unit.modules}
    assert all(any(module.startswith(f"layers.{index}") for module in modules) for index in range(8))
    with pytest.raises(InfeasibleBudgetError) as caught:
        _search(graph, _question(memory=least.timeline.peak_bytes - 1))
    assert caught.value.smallest_bytes == least.timeline.peak_bytes


def _link_bound(question: Question) -> Question:
    """The question on a device whose host costs nothing, so that communication is what a step waits for."""
    return replace(question, profile=msgspec.structs.replace(question.profile, unit_host_ns=0, launch_ns=0))


def test_memory_that_is_left_buys_time() -> None:
    graph = build(decoder(num_layers=6, hidden=32))
    question = _link_bound(_question())
    loose = _search(graph, question)
    resharded = _search(graph, replace(question, reshard="always"))
    assert loose.timeline.step_ns < resharded.timeline.step_ns
    between = (loose.timeline.peak_bytes + resharded.timeline.peak_bytes) // 2
    some = _search(graph, replace(question, allowed_bytes=between))
    assert loose.timeline.step_ns <= some.timeline.step_ns <= resharded.timeline.step_ns
    assert some.timeline.peak_bytes <= between


def test_a_tied_head_stays_with_its_embedding() -> None:
    found = _search(build(decoder(num_layers=3, hidden=8, tied=True)), _question())
    owners = [unit.modules for unit in found.decisions.units if {"embed", "head"} & set(unit.modules)]
    assert owners == [] or {"embed", "head"} <= set(owners[0])


def test_a_baseline_is_the_answer_where_nothing_else_fits() -> None:
    graph = build(decoder(num_layers=3, hidden=8))
    question = _question()
    analysis, profile = analyze(graph, num_shards=4), profile_step(graph, question)
    with pytest.raises(InfeasibleBudgetError) as caught:
        search(graph, analysis, replace(question, allowed_bytes=1), profile, [])
    root_only = baselines(graph, analysis, question)[0]
    peak = simulate(graph, root_only.decisions, question, profile).peak_bytes
    if peak < caught.value.smallest_bytes:
        found = search(graph, analysis, replace(question, allowed_bytes=peak), profile, [root_only])
        assert found.decisions == root_only.decisions
    assert caught.value.smallest_bytes > 1


def test_more_memory_is_never_slower() -> None:
    graph = build(decoder(num_layers=4, hidden=16))
    question = _question()
    loose = _search(graph, question).timeline
    times = []
    for percent in (100, 95, 90, 85, 80):
        try:
            times.append(
                _search(graph, replace(question, allowed_bytes=loose.peak_bytes * percent // 100)).timeline.step_ns
            )
        except InfeasibleBudgetError:
            break
    assert len(times) > 1
    assert all(earlier <= later for earlier, later in itertools.pairwise(times))


def test_infeasible_says_how_much_is_missing_and_where() -> None:
    graph = build(decoder(num_layers=2, hidden=8))
    with pytest.raises(InfeasibleBudgetError) as caught:
        _search(graph, _question(memory=4096))
    error = caught.value
    assert error.allowed_bytes == 4096
    assert error.missing_bytes == error.smallest_bytes - 4096 > 0
    assert error.bottleneck
    assert error.remedies[0].startswith("--memory ")
    roomy = _search(graph, _question(memory=error.smallest_bytes))
    assert roomy.timeline.peak_bytes <= error.smallest_bytes


def test_a_block_too_large_is_cut_down_the_legal_tree() -> None:
    graph = build(decoder(num_layers=3, hidden=32, vocab=5))
    with pytest.raises(InfeasibleBudgetError) as caught:
        _search(graph, _question(memory=1))
    coarse = _search(graph, _question(reshard="always")).timeline.peak_bytes
    assert caught.value.smallest_bytes < coarse
    found = _search(graph, _question(memory=caught.value.smallest_bytes))
    assert any(module.startswith("layers.0.") for unit in found.decisions.units for module in unit.modules)


def test_the_same_question_gives_the_same_decisions() -> None:
    first = _search(build(decoder(num_layers=3, hidden=8)), _question())
    second = _search(build(decoder(num_layers=3, hidden=8)), _question())
    assert first.decisions == second.decisions


def test_reshard_always_and_never_are_obeyed() -> None:
    graph = build(decoder(num_layers=3, hidden=8))
    assert all(unit.reshard for unit in _search(graph, _question(reshard="always")).decisions.units)
    assert not any(unit.reshard for unit in _search(graph, _question(reshard="never")).decisions.units)


def test_the_bound_is_not_above_the_step() -> None:
    found = _search(build(decoder(num_layers=3, hidden=8)), _question())
    assert 0 < found.optimal.bound_ns <= found.timeline.step_ns
    assert found.optimal.gap == pytest.approx(found.timeline.step_ns / found.optimal.bound_ns - 1, abs=1e-6)


def test_a_model_without_legal_plan_is_refused_with_all_reasons() -> None:
    broken: Mod = mod("", mod("a", weight=Par(shape=(4, 4), contiguous=False)), mod("b", weight=(4, 4)))
    with pytest.raises(NoLegalUnitError) as caught:
        _search(build(broken), _question())
    assert [d.where for d in caught.value.diagnostics] == ["a.weight"]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x).sin().exp()))


class _Deep(nn.Module):
    """Six blocks that save much more than they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(3, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(_Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for each in self.blocks:
            x = each(x)
        return self.head(x)


@functools.cache
def _deep() -> ModelGraph:
    return capture(_Deep(), ((torch.zeros(200, 3),), {}))


def test_blocks_recompute_only_as_far_as_it_takes() -> None:
    graph = _deep()
    loose = _search(graph, _question(recompute="none"))
    full = _search(graph, _question(recompute="full"))
    assert loose.decisions.recompute == ()
    assert full.decisions.recompute == tuple(f"blocks.{index}" for index in range(6))
    assert full.timeline.peak_bytes < loose.timeline.peak_bytes - 200_000
    assert _search(graph, _question()).decisions.recompute == ()
    counts = []
    for missing in (1, 300_000, 600_000):
        found = _search(graph, _question(memory=loose.timeline.peak_bytes - missing, reshard="always"))
        assert found.timeline.peak_bytes <= loose.timeline.peak_bytes - missing
        counts.append(len(found.decisions.recompute))
    assert counts == sorted(counts)
    assert 0 <= counts[0] < counts[1] < counts[2] < 6


def test_recompute_none_is_obeyed_where_it_makes_the_answer_a_no() -> None:
    graph = _deep()
    memory = _search(graph, _question(recompute="none", reshard="always", objective="memory")).timeline.peak_bytes - 1
    with pytest.raises(InfeasibleBudgetError):
        _search(graph, _question(memory=memory, recompute="none", reshard="always"))
    assert _search(graph, _question(memory=memory, reshard="always")).decisions.recompute


def test_what_recomputes_holds_no_unit() -> None:
    graph = _deep()
    with pytest.raises(InfeasibleBudgetError) as caught:
        _search(graph, _question(memory=1))
    found = _search(graph, _question(memory=caught.value.smallest_bytes))
    modules = {module for unit in found.decisions.units for module in unit.modules}
    for fqn in found.decisions.recompute:
        assert not any(module.startswith(f"{fqn}.") for module in modules)


def test_what_only_finer_cuts_fit_is_found() -> None:
    """The chain ends at the parts of blocks; here only units inside those fit, as ``simulate`` says of the plan."""
    graph = build(decoder(num_layers=4, hidden=64))
    analysis = analyze(graph, num_shards=64)
    question = resolve(Request(device="h100-80gb", devices=64, memory="200KiB"))
    found = search(graph, analysis, question, profile_step(graph, question), ())
    assert found.timeline.peak_bytes <= question.allowed_bytes
    assert ("layers.0.mlp.up",) in [unit.modules for unit in found.decisions.units]
    assert found.optimal.status != "proved"
