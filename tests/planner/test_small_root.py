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
from autoshard.planner import Baseline, Found, baselines, search, with_small_root
from autoshard.planner.candidate import candidate, decide
from autoshard.planner.small_root import root_bytes
from autoshard.request import Question, Request, resolve
from autoshard.simulate import profile_step, simulate
from autoshard.sizes import format_ns
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


class Wide(nn.Module):
    """Embedding and head of their own, each much larger than a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


IDS = ((torch.zeros(1, 5, dtype=torch.long),), {})


def test_a_small_model_gets_a_small_root_unless_all_is_allowed() -> None:
    request = Request(device="h100-80gb", devices=4)
    plan = make_plan(Wide(WIDTH), IDS, request=request)
    owner = {module: unit for unit in plan.units for module in unit.modules}
    assert owner["embed"] != owner["head"]
    total = sum(unit.num_bytes for unit in plan.units)
    assert max(unit.num_bytes for unit in plan.units) < total / 2
    (told,) = [each for each in plan.diagnostics if each.code == "AS304"]
    fastest = make_plan(Wide(WIDTH), IDS, request=replace(request, root_percent=100))
    assert [unit.modules for unit in fastest.units] == [("",)]
    assert fastest.projection.step_ns < plan.projection.step_ns
    for each in (plan, fastest):
        assert format_ns(each.projection.step_ns) in told.message
    assert "AS304" not in {each.code for each in fastest.diagnostics}


def test_a_larger_model_is_planned_for_time_alone() -> None:
    with torch.device("meta"):
        model = Wide(1700)
    assert sum(param.nbytes for param in model.parameters()) > 2**22
    request = Request(device="h100-80gb", devices=4)
    plan, all_allowed = (make_plan(model, IDS, request=each) for each in (request, replace(request, root_percent=100)))
    assert plan.units == all_allowed.units


def test_a_baseline_with_a_small_root_counts_too() -> None:
    graph, analysis, question, found = _parts(Wide(WIDTH), 50)
    found = _root_only(found, graph, question)
    profile = profile_step(graph, question)
    legal = [base for base in baselines(graph, analysis, question) if _is_legal(graph, analysis, base.decisions)]
    small, _ = with_small_root(found, graph, analysis, question, profile, lambda d: True, legal)
    total = sum(param.nbytes for param in graph.params)
    rivals = [base.decisions for base in legal if root_bytes(base.decisions) <= total // 2]
    assert rivals
    assert all(small.timeline.step_ns <= simulate(graph, each, question, profile).step_ns for each in rivals)


def test_a_baseline_is_the_answer_where_nothing_else_is_legal() -> None:
    graph, analysis, question, found = _parts(Wide(WIDTH), 50)
    found = _root_only(found, graph, question)
    profile = profile_step(graph, question)
    chosen = candidate((("embed",), ("layers.1",), ("head",)))
    rule = Baseline(name="by hand", candidate=chosen, decisions=decide(graph, analysis.space, question, chosen))
    small, told = with_small_root(found, graph, analysis, question, profile, rule.decisions.__eq__, [rule])
    assert (small.decisions, told) == (rule.decisions, ())
    assert small.timeline == simulate(graph, rule.decisions, question, profile)


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
