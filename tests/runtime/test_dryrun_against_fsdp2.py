"""The dry run against FSDP2 itself: random models and plans on two ranks.

What the dry run calls an error fails or trains wrongly; where it finds none, training equals that of one process.
"""

from random import Random

import pytest

from autoshard.analysis import analyze
from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.plan.schema import Decisions
from autoshard.runtime import dry_run
from tests.random_graphs import decide
from tests.runtime.ranks import note, run_ranks
from tests.torch_models import example_input, real_model
from tests.verify.test_against_fsdp2 import SHARDS, _trains_right

SEEDS = range(200, 260)


def _plan(seed: int) -> Decisions | None:
    """Any units at all, legal or not; ``None`` where nothing in the model trains or it cannot be sharded."""
    model, loss = real_model(Random(seed), seed)
    try:
        graph = capture(model, ((example_input(),), {}), loss=loss)
    except CaptureError:
        return None
    analysis = analyze(graph, num_shards=SHARDS)
    if any(each.severity == "error" for each in analysis.space.diagnostics):
        return None
    random = Random(seed)
    units = [(each.fqn,) for each in graph.modules if each.fqn and each.has_forward and random.random() < 0.5]
    return decide(graph, analysis, units)


def _failures(rank: int, world: int, plans: dict[int, Decisions]) -> dict[int, str]:
    found = {}
    for seed, plan in plans.items():
        note(f"seed {seed}")
        found[seed] = _trains_right(seed, plan)
    return found


@pytest.mark.slow
def test_the_dry_run_and_fsdp2_agree_on_any_plan() -> None:
    plans = {seed: plan for seed in SEEDS if (plan := _plan(seed)) is not None}
    assert len(plans) > 40
    told = {}
    for seed, plan in plans.items():
        model, loss = real_model(Random(seed), seed)
        told[seed] = [str(each) for each in dry_run(model, plan, ((example_input(),), {}), loss=loss)]
    failures, again = run_ranks(_failures, plans, world=SHARDS, seconds=120)
    assert set(failures) == set(again)
    errors = {seed: [each for each in found if " error:" in each] for seed, found in told.items()}
    wrong = {seed: (errors[seed], failures[seed]) for seed in plans if bool(errors[seed]) != bool(failures[seed])}
    assert wrong == {}
    assert min(sum(map(bool, failures.values())), sum(not each for each in failures.values())) >= 5
