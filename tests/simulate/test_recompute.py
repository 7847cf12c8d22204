"""Recompute in the fold: against real steps, against a captured model that recomputes by itself, and by hand."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import capture
from autoshard.errors import RequestError
from autoshard.ir import ModelGraph
from autoshard.ir.check import check
from autoshard.plan import Decisions
from autoshard.request import Question, Request, resolve
from autoshard.simulate import StepProfile, profile_step, simulate
from autoshard.simulate.recompute import recomputed
from tests.graphs import build, chain, mod
from tests.simulate.measured import decisions, measure
from tests.simulate.models import HIDDEN, Branches, Chain, Mlp, Outer, Recomputing, Twice, frozen, mean_square

TOLERANCE = 0.001
"""Of the measured peak."""

TOKENS = 701
"""Enough for activations to be most of the peak."""

LAYERS = tuple((f"layers.{index}",) for index in range(4))
NESTED = (("layers.0.inner.0",), ("layers.0.inner.1",), ("layers.0",), ("layers.1",), ("layers.2",))
BF16 = {"param": "bfloat16", "reduce": "float32"}


class Attention(nn.Module):
    """Attention and dropout, whose mask has to be drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.back = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.drop = nn.LayerNorm(HIDDEN), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        query, key, value = self.project(normed).reshape(1, 1, -1, 3 * HIDDEN).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + self.drop(self.back(mixed.reshape(x.shape)))


class Saving(nn.Module):
    """Ends in an op that saves what it makes, so that the second run does not stop before it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(HIDDEN, 499)
        self.back = nn.Linear(499, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.wide(x).relu()).softmax(-1)


def _chain() -> nn.Module:
    return Chain(Mlp(499), Mlp(997), Mlp(251), Mlp(499))


def _nested() -> nn.Module:
    return Chain(Outer(Mlp(499), Mlp(251)), Mlp(997), Outer(Mlp(251)))


def _mixed() -> nn.Module:
    return Chain(Attention(), Mlp(499), Saving(), Attention())


def _floats() -> tuple[Any, ...]:
    return (torch.ones(TOKENS, HIDDEN),)


def _layers(*indices: int) -> tuple[str, ...]:
    return tuple(f"layers.{index}" for index in indices)


@dataclass(frozen=True)
class Case:
    """A model and a plan for it."""

    build: Callable[[], nn.Module]
    plan: Decisions


CASES = {
    "chain": Case(_chain, decisions(*LAYERS, recompute=_layers(0, 1, 2, 3))),
    "chain, bf16": Case(_chain, decisions(*LAYERS, recompute=_layers(0, 1, 2, 3), **BF16)),
    "chain, replicas, bf16": Case(
        _chain, decisions(*LAYERS, shards=4, replicas=2, recompute=_layers(0, 1, 2, 3), **BF16)
    ),
    "chain, every other": Case(_chain, decisions(*LAYERS, recompute=_layers(0, 2))),
    "chain, root only": Case(_chain, decisions(recompute=_layers(0, 1, 2, 3))),
    "chain, kept": Case(_chain, decisions(*((layer, False) for layer in LAYERS), recompute=_layers(1, 3))),
    "chain, list units": Case(
        _chain, decisions(("layers.0", "layers.1"), ("layers.2", "layers.3"), recompute=_layers(0, 1, 2, 3))
    ),
    "chain, parts of layers": Case(_chain, decisions(*LAYERS, recompute=("layers.0.up", "layers.1.down"))),
    "chain, frozen layers": Case(
        lambda: frozen(_chain(), "layers.0", "layers.2"), decisions(*LAYERS, recompute=_layers(0, 1, 2, 3))
    ),
    "nested": Case(_nested, decisions(*LAYERS[:3], recompute=_layers(0, 1, 2), **BF16)),
    "nested, units inside": Case(_nested, decisions(*NESTED, recompute=_layers(0, 1, 2))),
    "nested, inner ones": Case(_nested, decisions(*NESTED, recompute=("layers.0.inner.0", "layers.2.inner.0"))),
    "attention and dropout": Case(_mixed, decisions(*LAYERS, recompute=_layers(0, 1, 2, 3))),
    "attention and dropout, bf16": Case(_mixed, decisions(*LAYERS, recompute=_layers(0, 2, 3), **BF16)),
    "called twice": Case(Twice, decisions(("shared",), ("other",), recompute=("shared",))),
    "branches": Case(
        Branches,
        decisions(
            *((f"branches.{index}",) for index in range(3)), recompute=tuple(f"branches.{index}" for index in range(3))
        ),
    ),
}


def _question(devices: int = 8) -> Question:
    return resolve(Request(device="cpu", devices=devices, precision="fp32"))


def _graph(case: Case) -> ModelGraph:
    dtype = "bfloat16" if case.plan.precision.param == "bfloat16" else "float32"
    return capture(case.build(), (_floats(), {}), loss=mean_square, compute_dtype=dtype)


@pytest.mark.parametrize("name", CASES)
def test_measured(name: str) -> None:
    case = CASES[name]
    graph = _graph(case)
    assert check(recomputed(graph, case.plan.recompute)) == ()
    measured = measure(case.build, case.plan, _floats(), mean_square, "adamw")
    timeline = simulate(graph, case.plan, _question(case.plan.num_devices))
    assert [(c.kind, c.num_bytes, c.dtype) for c in timeline.collectives()] == list(measured.collectives)
    pairs = {
        "forward peak": (timeline.phase_peak_bytes("forward"), measured.forward_peak),
        "after forward": (timeline.phase_end_bytes("forward"), measured.after_forward),
        "backward peak": (timeline.phase_peak_bytes("backward"), measured.backward_peak),
        "after backward": (timeline.phase_end_bytes("backward"), measured.after_backward),
    }
    allowed = TOLERANCE * max(measured.forward_peak, measured.backward_peak)
    wrong = {where: pair for where, pair in pairs.items() if abs(pair[0] - pair[1]) > allowed}
    assert not wrong, f"(projected, measured): {wrong}"


def test_less_is_kept_than_without() -> None:
    case = CASES["chain"]
    graph = _graph(case)
    plain = simulate(graph, _with_recompute(case.plan, ()), _question())
    saved = simulate(graph, case.plan, _question())
    # Every layer saves its input anyway; its wide activations (two a layer) and the product with the scale are gone.
    widths = (499, 997, 251, 499)
    gone = sum(2 * width + HIDDEN for width in widths) * TOKENS * 4
    assert plain.phase_end_bytes("forward") - saved.phase_end_bytes("forward") == gone


def _with_recompute(plan: Decisions, modules: tuple[str, ...]) -> Decisions:
    return Decisions(**{name: getattr(plan, name) for name in plan.__struct_fields__} | {"recompute": modules})


def _without_recompute() -> nn.Module:
    return Chain(*(Outer(Mlp(width), Mlp(251)) for width in (499, 997)))


def test_same_as_a_captured_model_that_recomputes() -> None:
    plain = capture(_without_recompute(), (_floats(), {}), loss=mean_square)
    own = capture(Recomputing(), (_floats(), {}), loss=mean_square)
    made = recomputed(plain, _layers(0, 1))
    assert _ops(made) == _ops(own)
    ours, theirs = profile_step(plain, _question(), _layers(0, 1)), profile_step(own, _question())
    assert ours.between[: ours.num_forward + 1] == theirs.between[: theirs.num_forward + 1]
    assert ours.recompute_ns == theirs.recompute_ns > 0
    assert ours.compute_ns == theirs.compute_ns
    assert _hooks(made, ours) == _hooks(own, theirs)


def _moves_data(graph: ModelGraph) -> list[bool]:
    """Whether ops move data; torch's second run has some views of its own, one for each tensor that it saves."""
    return [not op.is_view and "detach" not in op.target for op in graph.root.backward]


def _ops(graph: ModelGraph) -> list[tuple[str, str]]:
    moves = _moves_data(graph)
    return [(op.target, op.module) for op, is_move in zip(graph.root.backward, moves, strict=True) if is_move]


def _hooks(graph: ModelGraph, profile: StepProfile) -> dict[str, list[tuple[int, ...]]]:
    """Where backwards and second runs begin and end, by module, counted in ops that move data."""
    moves = _moves_data(graph)

    def place(position: int) -> int:
        return sum(moves[: position - profile.num_forward])

    found = {}
    for fqn, runs in profile.runs.items():
        stretches = [run.backward for run in runs if run.backward] + list(profile.replays.get(fqn, ()))
        found[fqn] = [tuple(map(place, stretch)) for stretch in stretches]
    return found


def test_time_by_hand() -> None:
    graph = build(chain(10, 14))
    question = resolve(Request(device="h100-80gb", devices=2))
    plain = profile_step(graph, question)
    again = profile_step(graph, question, ("0",))
    assert plain.recompute_ns == 0
    assert again.compute_ns - plain.compute_ns == again.recompute_ns


def test_profiles_are_kept_for_each_set() -> None:
    graph = build(chain(10, 14, 3))
    question = _question()
    both = [profile_step(graph, question, modules) for modules in ((), ("0",), ("0", "2"))]
    assert [profile.recompute for profile in both] == [(), ("0",), ("0", "2")]
    assert [profile_step(graph, question, profile.recompute) for profile in both] == both
    assert all(profile_step(graph, question, profile.recompute) is profile for profile in both)


def test_a_block_that_saves_less_than_its_arguments_keeps_more() -> None:
    """Not a law: recomputing ``sum`` of a wide input makes it live longer, although nothing of it was saved."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.scale = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.bias).mean(0) * self.scale

    case = Case(lambda: Chain(Mlp(499), Adds()), decisions(*LAYERS[:2], recompute=("layers.1",)))
    graph = _graph(case)
    plain = simulate(graph, _with_recompute(case.plan, ()), _question())
    again = simulate(graph, case.plan, _question())
    assert again.phase_end_bytes("forward") > plain.phase_end_bytes("forward")
    measured = measure(case.build, case.plan, _floats(), mean_square, "adamw")
    assert again.phase_end_bytes("forward") == measured.after_forward


class TestRefusals:
    def _refused(self, graph: ModelGraph, *modules: str) -> str:
        with pytest.raises(RequestError) as caught:
            simulate(graph, decisions(recompute=modules), _question())
        assert caught.value.field == "recompute"
        return str(caught.value)

    def test_unknown(self) -> None:
        assert "a module of the model" in self._refused(build(chain(10, 14)), "7")

    def test_one_inside_another(self) -> None:
        graph = build(mod("", mod("a", mod("b", weight=(3,)))))
        assert "(a.b)" in self._refused(graph, "a", "a.b")

    def test_checkpointed(self) -> None:
        graph = build(chain(10, 14))
        marked = tuple(replace(node, traits=("checkpointed",)) if node.fqn == "1" else node for node in graph.modules)
        assert "1 does" in self._refused(replace(graph, modules=marked), "1")


@pytest.mark.parametrize("name", ["chain, every other", "chain, parts of layers", "nested, inner ones", "called twice"])
def test_a_profile_is_that_of_the_rewritten_graph(name: str) -> None:
    """What is rewritten by numbers is the graph that ``recomputed`` makes: its profile has the same curves."""
    graph, modules = _graph(CASES[name]), CASES[name].plan.recompute
    profile = profile_step(graph, _question(), modules)
    rewritten = profile_step(recomputed(graph, modules), _question())
    for field in ("during", "between", "elapsed_ns", "launched", "labels", "gradients", "runs", "recompute_ns"):
        assert getattr(profile, field) == getattr(rewritten, field), field
