"""A root that owns little where the request asks for it: what is extended, and what is told if it cannot be."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autoshard import make_plan
from autoshard.analysis import analyze
from autoshard.analysis.space import Analysis
from autoshard.capture import capture
from autoshard.errors import RequestError
from autoshard.ir import ModelGraph
from autoshard.planner import Found, baselines, search, with_small_root
from autoshard.planner.small_root import root_bytes
from autoshard.request import Question, Request, resolve
from autoshard.simulate import profile_step, simulate
from autoshard.verify import verify_plan

VOCAB, WIDTH = 211, 13


class Tied(nn.Module):
    """Embedding and head share one weight and run at both ends of the step."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)))


class Bare(nn.Module):
    """The root holds the weight itself: no unit below it can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(self.weight[ids])


def _parts(model: nn.Module, percent: int) -> tuple[ModelGraph, Analysis, Question, Found]:
    question = resolve(Request(device="h100-80gb", devices=4, root_percent=percent))
    graph = capture(model, ((torch.zeros(1, 5, dtype=torch.long),), {}), compute_dtype=question.compute_dtype)
    analysis = analyze(graph, num_shards=4)
    legal = [base for base in baselines(graph, analysis, question) if _is_legal(graph, analysis, base.decisions)]
    return graph, analysis, question, search(graph, analysis, question, profile_step(graph, question), legal)


def _is_legal(graph: ModelGraph, analysis: Analysis, decisions: object) -> bool:
    return not any(d.severity == "error" for d in verify_plan(decisions, graph, analysis))  # type: ignore[arg-type]


def _root_only(found: Found, graph: ModelGraph, question: Question) -> Found:
    """The found plan as if the search had left everything in the root."""
    total = sum(param.nbytes for param in graph.params)
    root = found.decisions.units[-1]
    unit = type(root)(
        modules=("",), reshard=False, num_params=len(graph.params), num_bytes=total, digest=root.digest, shard_dims={}
    )
    decisions = type(found.decisions)(
        **{name: getattr(found.decisions, name) for name in found.decisions.__struct_fields__} | {"units": (unit,)}
    )
    timeline = simulate(graph, decisions, question, profile_step(graph, question))
    return replace(found, decisions=decisions, timeline=timeline)


def test_tied_ends_become_one_list_unit() -> None:
    graph, analysis, question, found = _parts(Tied(), 25)
    found = _root_only(found, graph, question)
    small, told = with_small_root(
        found, graph, analysis, question, profile_step(graph, question), lambda d: _is_legal(graph, analysis, d)
    )
    assert ("embed", "head") in [unit.modules for unit in small.decisions.units]
    total = VOCAB * WIDTH * 4 + 2 * (WIDTH * WIDTH + WIDTH) * 4
    assert root_bytes(found.decisions) == total
    assert root_bytes(small.decisions) <= total // 4
    assert told == ()
    assert _is_legal(graph, analysis, small.decisions)
    assert small.timeline == simulate(graph, small.decisions, question, profile_step(graph, question))
    assert small.optimal.status != "proved"
    assert small.optimal.bound_ns == found.optimal.bound_ns


def test_a_root_that_is_small_enough_stays_as_it_is() -> None:
    graph, analysis, question, found = _parts(Tied(), 100)
    same, told = with_small_root(found, graph, analysis, question, profile_step(graph, question), lambda d: True)
    assert (same, told) == (found, ())


def test_what_no_unit_may_own_is_told() -> None:
    plan = make_plan(
        Bare(),
        ((torch.zeros(1, 5, dtype=torch.long),), {}),
        request=Request(device="h100-80gb", devices=4, root_percent=25),
    )
    (told,) = [each for each in plan.diagnostics if each.code == "AS303"]
    assert "more than the 25%" in told.message
    share = VOCAB * WIDTH / (VOCAB * WIDTH + WIDTH * WIDTH + WIDTH)
    assert f"{share:.0%} of the parameter bytes" in told.message


def test_nothing_that_breaks_a_rule_is_taken() -> None:
    graph, analysis, question, found = _parts(Tied(), 25)
    found = _root_only(found, graph, question)
    same, told = with_small_root(found, graph, analysis, question, profile_step(graph, question), lambda d: False)
    assert same.decisions == found.decisions
    assert [each.code for each in told] == ["AS303"]


@pytest.mark.parametrize("percent", [-1, 101, 2.5, True, "25%"])
def test_a_percentage_is_a_whole_number_up_to_100(percent: object) -> None:
    with pytest.raises(RequestError, match="0 to 100"):
        resolve(Request(device="cpu", root_percent=percent))  # type: ignore[arg-type]
