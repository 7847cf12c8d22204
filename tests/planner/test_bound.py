"""The lower bound holds for every plan, and does not depend on the plan from which its sums are taken."""

import itertools
from dataclasses import replace

import msgspec
import pytest

from autoshard.analysis import analyze
from autoshard.planner.bound import lower_bound_ns
from autoshard.planner.candidate import candidate, decide
from autoshard.request import Question, Request, resolve
from autoshard.simulate import Timeline, profile_step, simulate
from tests.graphs import build, decoder

GRAPH = build(decoder(num_layers=3, hidden=16))
UNITS = [("embed",), ("layers.0",), ("layers.1",), ("layers.2",), ("head",)]


def _question(**faster: object) -> Question:
    question = resolve(Request(device="cpu", devices=4, memory="1GiB"))
    return replace(question, profile=msgspec.structs.replace(question.profile, **faster))


def _timelines(question: Question) -> list[Timeline]:
    """The step under every subset of the units, everything resharded and everything kept."""
    space, profile = analyze(GRAPH, num_shards=4).space, profile_step(GRAPH, question)
    found = []
    for size in range(len(UNITS) + 1):
        for units in itertools.combinations(UNITS, size):
            for kept in ((), units):
                decisions = decide(GRAPH, space, question, candidate(units, kept))
                found.append(simulate(GRAPH, decisions, question, profile))
    return found


@pytest.mark.parametrize(
    "faster",
    [{}, {"unit_host_ns": 0, "launch_ns": 0}, {"unit_host_ns": 0, "flops_per_second": {"float32": 10**15}}],
    ids=["as it is", "free host", "fast compute"],
)
def test_no_plan_undercuts_the_bound_of_any_plan(faster: dict[str, object]) -> None:
    question = _question(**faster)
    profile = profile_step(GRAPH, question)
    timelines = _timelines(question)
    bounds = {lower_bound_ns(timeline, profile, question) for timeline in timelines}
    assert max(bounds) <= min(timeline.step_ns for timeline in timelines)
    assert max(bounds) - min(bounds) <= len(UNITS) + 1  # the rounding of wire times
    assert min(bounds) > 0


def test_each_stream_can_be_the_longest() -> None:
    slow_host = _question(unit_host_ns=10**12)
    profile = profile_step(GRAPH, slow_host)
    timeline = _timelines(slow_host)[0]
    assert lower_bound_ns(timeline, profile, slow_host) > 10**12
    slow_link = _question(within_node=msgspec.structs.replace(slow_host.profile.within_node, bytes_per_second=1000))
    timeline = _timelines(slow_link)[0]
    num_bytes = sum(param.nbytes for param in GRAPH.params)
    # Gathered and reduced once each: two times three quarters of all bytes, at 80 % of 1000 bytes a second.
    achieved = 1000 * slow_link.profile.achievable["link"]
    bound = lower_bound_ns(timeline, profile_step(GRAPH, slow_link), slow_link)
    assert bound >= 2 * num_bytes * 3 / 4 / achieved * 10**9
