"""The world of the sweep: random plans have the price that the fold gives them, and no bound is above what follows."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from autoshard.analysis import analyze
from autoshard.planner.candidate import decide
from autoshard.planner.frame import ChainSpace, to_candidate
from autoshard.planner.labels import Tables, extend, price, start_label
from autoshard.planner.suffix import Bounds
from autoshard.planner.world import Option, Start, World
from autoshard.request import Question
from autoshard.simulate import profile_step, simulate
from tests.graphs import build
from tests.planner.test_oracle import a_question, small_model

LONGEST = 4


def a_plan(world: World, random: Random, longest: int = LONGEST) -> tuple[Start, list[Option]]:
    """A random plan; a start may end in the midst of places that are never parted, where nothing begins."""
    last = world.chain.num_borders - 1
    starts = [each for each in world.starts(longest) if each.stop == last or world.options(each.stop, longest)]
    start, options = random.choice(starts), []
    border = start.stop
    while border < last:
        options.append(random.choice(world.options(border, longest)))
        border += options[-1].length
    return start, options


def a_world(seed: int, most: int) -> tuple[ChainSpace, Question, list[World]]:
    random = Random(seed)
    graph = build(small_model(random, most))
    question = a_question(random)
    if random.random() < 0.3:
        question = replace(question, num_replicas=2)
    analysis = analyze(graph, num_shards=question.num_shards)
    space = ChainSpace(graph, analysis, question, profile_step(graph, question))
    worlds = [world for choice in space.root_choices() if (world := space.world(choice, 1)) is not None]
    return space, question, worlds


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_have_the_price_of_the_fold(seed: int) -> None:
    space, question, worlds = a_world(seed, 6)
    random = Random(seed)
    for world in worlds:
        for _ in range(4):
            start, options = a_plan(world, random)
            decisions = decide(space.graph, space.analysis.space, question, to_candidate(world, start, options))
            timeline = simulate(space.graph, decisions, question)
            assert price(Tables(world), start, options) == (timeline.step_ns, timeline.peak_bytes)


@pytest.mark.parametrize("longest", [1, LONGEST])
@pytest.mark.parametrize("seed", range(12))
def test_no_bound_is_above_a_plan_that_fits(seed: int, longest: int) -> None:
    """Along a plan, with exactly the room that it takes, each label's bound is at most the step of the plan."""
    _, _, worlds = a_world(seed, 8)
    random = Random(seed)
    for world in worlds:
        tables = Tables(world)
        for _ in range(8):
            start, options = a_plan(world, random, longest)
            step_ns, peak_bytes = price(tables, start, options)
            bounds = Bounds(world, peak_bytes, longest)
            label, border = start_label(start)[None, :], start.stop
            for option in options:
                assert int(bounds(border, label)[0]) <= step_ns
                found = tables.of((option,))
                assert found is not None
                label, border = extend(world, border, label, found).labels[0], border + option.length


def test_a_bound_counts_what_the_rest_of_the_chain_needs() -> None:
    """With a byte less than the best plan of any kind takes, no label at the start has a bound."""
    space, _, worlds = a_world(3, 6)
    assert space.analysis.space.atoms
    for world in worlds:
        bounds = Bounds(world, 1, LONGEST)
        for start in world.starts(1):
            assert np.all(bounds(start.stop, start_label(start)[None, :]) >= 1 << 60)
