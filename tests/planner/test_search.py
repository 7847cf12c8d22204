"""The search: what it chooses on small worlds, that it never loses to a baseline, what it says if nothing fits."""

import itertools
from dataclasses import replace

import pytest

from autoshard.analysis import analyze
from autoshard.errors import InfeasibleBudgetError, NoLegalUnitError
from autoshard.ir import ModelGraph
from autoshard.planner import Found, baselines, search
from autoshard.planner.candidate import candidate, decide
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


def test_blocks_embedding_and_tail_are_units_and_the_root_is_small() -> None:
    found = _search(build(decoder(num_layers=3, hidden=8)), _question(reshard="always"))
    units = {unit.modules for unit in found.decisions.units}
    assert {("layers.0",), ("layers.1",), ("layers.2",)} <= units or any(
        len(u) > 1 and u[0] == "layers.0" for u in units
    )
    assert found.decisions.units[-1].modules == ("",)
    assert found.decisions.units[-1].num_bytes < 1000


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.9, 0.75])
def test_never_worse_than_a_legal_baseline_that_fits(tied: bool, fraction: float) -> None:
    graph = build(decoder(num_layers=4, hidden=16, tied=tied))
    question = _question()
    analysis = analyze(graph, num_shards=question.num_shards)
    profile = profile_step(graph, question)
    per_block = next(base for base in baselines(graph, analysis, question) if base.name.startswith("per block"))
    peak = simulate(graph, per_block.decisions, question, profile).peak_bytes
    question = replace(question, allowed_bytes=int(peak * fraction))
    try:
        found = _search(graph, question)
    except InfeasibleBudgetError as error:
        assert error.smallest_bytes > question.allowed_bytes  # noqa: PT017
        return
    assert found.timeline.peak_bytes <= question.allowed_bytes
    for base in baselines(graph, analysis, question):
        timeline = simulate(graph, base.decisions, question, profile)
        legal = not any(d.severity == "error" for d in verify_plan(base.decisions, graph, analysis))
        if legal and timeline.peak_bytes <= question.allowed_bytes:
            assert found.timeline.step_ns <= timeline.step_ns


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
    question = _question(reshard="always")
    analysis = analyze(graph, num_shards=question.num_shards)
    coarse = decide(graph, analysis.space, question, candidate((f"layers.{i}",) for i in range(3)))
    peak = simulate(graph, coarse, question).peak_bytes
    found = _search(graph, replace(question, allowed_bytes=peak - 1))
    assert found.timeline.peak_bytes < peak
    assert any("layers.0." in module for unit in found.decisions.units for module in unit.modules)


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
