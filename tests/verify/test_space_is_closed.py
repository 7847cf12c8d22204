"""The promise of a legal space: whatever a planner chooses inside it breaks no rule."""

from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.analysis import analyze
from autoshard.ir.check import check
from autoshard.verify import verify_plan
from tests.random_graphs import NUM_SHARDS, decide, random_graph, random_units


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False))
def test_any_choice_inside_the_space_is_legal(random: Random) -> None:
    graph = random_graph(random)
    assert check(graph) == ()
    analysis = analyze(graph, num_shards=NUM_SHARDS)
    if any(found.severity == "error" for found in analysis.space.diagnostics):
        return
    for _ in range(4):
        plan = decide(graph, analysis, random_units(random, graph, analysis))
        findings = verify_plan(plan, graph, analysis)
        assert [found for found in findings if found.severity != "note"] == []
