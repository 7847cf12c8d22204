"""How long the search takes, beside the fold on the same machine: a ratio, since seconds say little about a test."""

import time
from collections.abc import Callable

from autoshard.analysis import analyze
from autoshard.planner import baselines, search
from autoshard.request import Request, resolve
from autoshard.simulate import profile_step, simulate
from autoshard.verify import verify_plan
from tests.graphs import build, decoder

MOST_FOLDS = 600
"""Steps folded; it took about 170."""


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def test_a_search_takes_no_longer_than_so_many_folds() -> None:
    graph = build(decoder(num_layers=64, hidden=512))
    question = resolve(Request(device="h100-80gb", devices=8, memory="700MB"))
    analysis, profile = analyze(graph, num_shards=8), profile_step(graph, question)
    known = [
        base
        for base in baselines(graph, analysis, question)
        if not any(found.severity == "error" for found in verify_plan(base.decisions, graph, analysis))
    ]
    found = []
    searching = seconds(lambda: found.append(search(graph, analysis, question, profile, known)))
    plan = found[0].decisions
    folding = min(seconds(lambda: simulate(graph, plan, question)) for _ in range(5))
    assert searching < MOST_FOLDS * folding
