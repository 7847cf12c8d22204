"""The search against brute force: equal time, equal infeasibility, for every allowance, on small random models."""

from dataclasses import replace
from random import Random

import msgspec
import pytest

from autoshard.analysis import analyze
from autoshard.errors import InfeasibleBudgetError
from autoshard.planner import baselines, every, search
from autoshard.planner.candidate import decide
from autoshard.request import Question, Request, resolve
from autoshard.simulate import profile_step, simulate
from autoshard.verify import verify_plan
from tests.graphs import Mod, Par, build, mod
from tests.planner.oracle import every_plan, is_along_chain, replay

LONGEST = 4


def small_model(random: Random, most: int) -> Mod:
    """Modules in a row: leaves, blocks of two, runs of equal blocks that may recompute, inputs without gradient."""
    count = random.randint(2, most)
    is_run = random.random() < 0.5
    places = []
    shape, saved = _shape(random), random.choice((0, 4_000, 400_000))
    for index in range(count):
        if is_run and index > 0:
            like = (Par(shape=shape),)
        else:
            like = tuple(Par(shape=_shape(random), requires_grad=index == 0 or random.random() > 0.1) for _ in "ab")
        if not is_run and random.random() < 0.3:
            parts = [
                mod(f"p{place}", weight=par, saved=random.choice((0, 8_000)), cls=f"P{place}", takes_grad=index > 0)
                for place, par in enumerate(like)
            ]
            places.append(mod(f"b{index}", *parts, cls=f"B{index}"))
        else:
            kind = "Block" if is_run and index else f"M{index}"
            places.append(mod(f"b{index}", weight=like[0], saved=saved, cls=kind, takes_grad=index > 0))
    own = {"weight": Par(shape=(4, 3))} if random.random() < 0.5 else {}
    return mod("", *places, **own)


def _shape(random: Random) -> tuple[int, int]:
    return random.choice(((4, 8), (16, 200), (64, 700), (40, 3_000)))


def a_question(random: Random) -> Question:
    """Some devices are bound by the host, some by the link, some by compute."""
    device = random.choice(("h100-80gb", "a100-40gb", "l40s"))
    question = resolve(Request(device=device, devices=4, precision=random.choice(("fp32", "bf16"))))
    profile = question.profile
    if random.random() < 0.6:
        profile = msgspec.structs.replace(profile, unit_host_ns=random.choice((0, 3_000)), launch_ns=0)
    if random.random() < 0.5:
        slow = {name: rate // 5_000 for name, rate in profile.flops_per_second.items()}
        profile = msgspec.structs.replace(profile, flops_per_second=slow)
    return replace(question, profile=profile)


def compare(seed: int, most: int, along_chain: bool) -> int:
    """The search and all plans under several allowances; the number of plans, 0 if the search prices all of them."""
    random = Random(seed)
    graph = build(small_model(random, most))
    question = a_question(random)
    analysis = analyze(graph, num_shards=question.num_shards)
    profile = profile_step(graph, question)
    space = analysis.space
    if not along_chain and every.every_plan(graph, space, question) is None:
        return 0
    plans = every_plan(graph, analysis, LONGEST)
    if along_chain:
        plans = [plan for plan in plans if is_along_chain(graph, analysis, plan)]
    prices = {}
    for plan in plans:
        decisions = decide(graph, space, question, plan)
        assert not [found for found in verify_plan(decisions, graph, analysis) if found.severity == "error"]
        prices[plan] = replay(graph, decisions, question)
    for plan in random.sample(plans, min(20, len(plans))):
        timeline = simulate(graph, decide(graph, space, question, plan), question)
        assert (timeline.step_ns, timeline.peak_bytes) == (prices[plan].step_ns, prices[plan].peak_bytes)
    known = [base for base in baselines(graph, analysis, question) if base.candidate in prices]
    peaks = sorted({price.peak_bytes for price in prices.values()})
    allowances = {peaks[0] - 1, peaks[0], peaks[-1], *random.sample(peaks, min(6, len(peaks)))}
    for allowed in sorted(allowances):
        best = min((price.step_ns for price in prices.values() if price.peak_bytes <= allowed), default=None)
        asked = replace(question, allowed_bytes=allowed)
        if best is None:
            with pytest.raises(InfeasibleBudgetError) as caught:
                search(graph, analysis, asked, profile, known)
            assert caught.value.smallest_bytes == peaks[0]
            continue
        found = search(graph, analysis, asked, profile, known)
        assert found.timeline.step_ns == best, (seed, allowed)
        assert found.timeline.peak_bytes <= allowed
        assert found.optimal.status == "proved"
    return len(plans)


@pytest.mark.parametrize("seed", range(6))
def test_a_small_space_is_searched_whole(seed: int) -> None:
    compare(seed, 2, along_chain=False)


@pytest.mark.parametrize("seed", range(6))
def test_the_sweep_finds_the_best_plan_along_the_chain(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every, "MAX_PLANS", 0)
    assert compare(seed, 3, along_chain=True) > 1
