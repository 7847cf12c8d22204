"""A grid is its questions one by one; given plans are scored by the fold and held against the rules."""

import msgspec
import pytest

from autoshard.analysis import analyze
from autoshard.errors import InfeasibleBudgetError
from autoshard.plan import Axis, Decisions, Precision
from autoshard.planner.candidate import candidate, decide
from autoshard.request import Request, resolve
from autoshard.simulate import simulate
from autoshard.studies import compare_plans, sweep
from tests.studies.subjects import GraphSubject, RuleSubject

REQUEST = Request(device="h100-80gb", devices=4, memory="1GiB", precision="fp32")


def decisions(*units: tuple[str, ...], shards: int) -> Decisions:
    question = resolve(Request(device="h100-80gb", devices=shards, precision="fp32", memory="1GiB"))
    graph = GraphSubject().graph(question)
    return decide(graph, analyze(graph, num_shards=shards).space, question, candidate(units))


def test_a_grid_is_all_its_questions_in_order() -> None:
    subject = RuleSubject(lambda devices, batch, seq: 1_000 * batch // devices)
    cells = list(sweep(subject, REQUEST, (2, 8), (16, 64), (3_000, 9_000)))
    assert [(cell.batch, cell.devices, cell.allowed_bytes) for cell in cells] == [
        (batch, devices, memory) for batch in (16, 64) for devices in (2, 8) for memory in (3_000, 9_000)
    ]
    for cell in cells:
        fits = 1_000 * (cell.batch or 0) // cell.devices <= cell.allowed_bytes
        assert (cell.answer is not None, cell.error is None) == (fits, fits)


def test_what_is_not_given_is_the_requests() -> None:
    (cell,) = sweep(RuleSubject(lambda *asked: 5), REQUEST)
    assert (cell.devices, cell.batch, cell.allowed_bytes) == (4, None, 2**30)


def test_ours_and_theirs_by_the_same_fold() -> None:
    subject = GraphSubject()
    layers = [(f"layers.{index}",) for index in range(4)]
    theirs = decisions(("embed",), *layers, shards=4)
    whole = decisions(shards=4)
    ours, first, second = compare_plans(subject, REQUEST, {"theirs": theirs, "whole": whole})
    question = resolve(REQUEST)
    expected = simulate(subject.graph(question), theirs, question)
    assert (first.name, first.verdict, first.num_units) == ("theirs", "fits", 6)
    assert (first.peak_bytes, first.step_ns) == (expected.peak_bytes, expected.step_ns)
    assert second.num_units == 1
    assert ours.verdict == "fits"
    answer = subject.ask(REQUEST)
    assert ours.step_ns == answer.found.timeline.step_ns


def test_an_illegal_plan_is_not_priced_and_one_too_large_does_not_fit() -> None:
    subject = GraphSubject()
    broken = decisions(("layers",), shards=4)
    request = Request(device="h100-80gb", devices=4, memory="300KiB", precision="fp32")
    scores = {
        score.name: score for score in compare_plans(subject, request, {"list": broken, "whole": decisions(shards=4)})
    }
    assert scores["list"].verdict == "not legal"
    assert (scores["list"].peak_bytes, scores["list"].step_ns) == (0, 0)
    assert any(found.severity == "error" for found in scores["list"].findings)
    assert scores["whole"].verdict == "does not fit"
    assert scores["whole"].peak_bytes > 300 * 2**10


def test_a_plan_keeps_its_own_mesh_and_precision() -> None:
    subject = GraphSubject()
    wide = decisions(("embed",), shards=8)
    mesh = (Axis(name="replicate", size=2, role="replicate"), Axis(name="shard", size=4, role="shard"))
    two = msgspec.structs.replace(wide, mesh=mesh, precision=Precision(param="bfloat16", reduce="float32"))
    _, first, second = compare_plans(subject, REQUEST, {"eight": wide, "two axes": two})
    question = resolve(Request(device="h100-80gb", devices=8, memory="1GiB", precision="fp32"))
    assert first.step_ns == simulate(subject.graph(question), wide, question).step_ns
    assert second.peak_bytes != first.peak_bytes


def test_where_nothing_of_ours_fits_theirs_is_scored_all_the_same() -> None:
    subject = GraphSubject()
    request = Request(device="h100-80gb", devices=4, memory="2KiB", precision="fp32")
    with pytest.raises(InfeasibleBudgetError) as caught:
        subject.ask(request)
    ours, theirs = compare_plans(subject, request, {"theirs": decisions(shards=4)})
    assert (ours.verdict, ours.peak_bytes) == ("none fits", caught.value.smallest_bytes)
    assert theirs.verdict == "does not fit"
