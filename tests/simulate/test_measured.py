"""Projected against measured: real steps under the fake process group, bytes and collectives.

The measured side shares nothing with the simulator: it counts storages and calls of a real sharded model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import capture
from autoshard.ir import ModelGraph
from autoshard.plan import Decisions
from autoshard.request import Question, Request, resolve
from autoshard.simulate import Timeline, simulate
from tests.simulate import models
from tests.simulate.measured import Measured, decisions, measure
from tests.simulate.models import Branches, Chain, Language, Mlp, Outer, Partly, Twice, frozen

pytestmark = pytest.mark.slow

TOLERANCE = 0.001
"""Of the measured peak. Nearly all cases are exact to the byte; the rest are cast inputs that Python holds longer."""

LAYERS = tuple((f"layers.{index}",) for index in range(4))


@dataclass(frozen=True)
class Case:
    """A model and a plan for it."""

    build: Callable[[], nn.Module]
    plan: Decisions
    inputs: Callable[[], tuple[Any, ...]] = models.floats
    optimizer: str = "adamw"


def _chain(head: bool = False) -> nn.Module:
    return Chain(Mlp(499), Mlp(997), Mlp(251), Mlp(499), head=head)


def _nested() -> nn.Module:
    return Chain(Outer(Mlp(499), Mlp(251)), Mlp(997), Outer(Mlp(251)))


NESTED = (
    ("layers.0.inner.0",),
    ("layers.0.inner.1",),
    ("layers.0",),
    ("layers.1",),
    ("layers.2.inner.0",),
    ("layers.2",),
)
TAIL = (("norm", "head"), False)
BF16 = {"param": "bfloat16", "reduce": "float32"}

CASES = {
    "chain": Case(_chain, decisions(*LAYERS)),
    "chain on 64": Case(_chain, decisions(*LAYERS, shards=64)),
    "chain, root only": Case(_chain, decisions()),
    "chain, root only, resharded": Case(_chain, decisions(root_reshard=True)),
    "chain, kept": Case(_chain, decisions(*((layer, False) for layer in LAYERS))),
    "chain, last kept": Case(_chain, decisions(*LAYERS[:3], (LAYERS[3], False))),
    "chain, root with parameters": Case(lambda: _chain(head=True), decisions(*LAYERS)),
    "chain, root resharded": Case(lambda: _chain(head=True), decisions(*LAYERS, root_reshard=True)),
    "chain, list units": Case(_chain, decisions(("layers.0", "layers.1"), ("layers.2", "layers.3"))),
    "chain, first and last in a list": Case(_chain, decisions(("layers.0", "layers.3"), *LAYERS[1:3])),
    "chain, bf16": Case(_chain, decisions(*LAYERS, **BF16)),
    "chain, bf16 reduced in bf16": Case(_chain, decisions(*LAYERS, param="bfloat16")),
    "chain, reduced in bf16": Case(_chain, decisions(*LAYERS, reduce="bfloat16")),
    "chain, stored in bf16": Case(lambda: _chain().to(torch.bfloat16), decisions(*LAYERS), models.halves),
    "chain, one device": Case(_chain, decisions(*LAYERS, shards=1)),
    "chain, one device, bf16": Case(_chain, decisions(*LAYERS, shards=1, **BF16)),
    "chain, replicas": Case(_chain, decisions(*LAYERS, shards=4, replicas=2)),
    "chain, replicas, bf16": Case(_chain, decisions(*LAYERS, shards=4, replicas=2, **BF16)),
    "chain, sharded along dim 1": Case(
        _chain, decisions(*LAYERS, shard_dims={"layers.0.up.weight": 1, "layers.2.up.weight": 1})
    ),
    "chain, momentum": Case(_chain, decisions(*LAYERS), optimizer="sgd-momentum"),
    "chain, sgd": Case(_chain, decisions(*LAYERS), optimizer="sgd"),
    "nested": Case(_nested, decisions(*NESTED)),
    "nested, bf16": Case(_nested, decisions(*NESTED, **BF16)),
    "nested, replicas, bf16": Case(_nested, decisions(*NESTED, replicas=2, **BF16)),
    "frozen layers": Case(lambda: frozen(_chain(), "layers.0", "layers.2"), decisions(*LAYERS)),
    "frozen part of layers": Case(lambda: frozen(_chain(), "layers.1.up", "layers.3.scale"), decisions(*LAYERS)),
    "embedding": Case(lambda: Language(499, 251), decisions(("embed",), *LAYERS[:2], TAIL), models.ids),
    "embedding, bf16": Case(lambda: Language(499, 251), decisions(("embed",), *LAYERS[:2], TAIL, **BF16), models.ids),
    "embedding in the root": Case(lambda: Language(499, 251), decisions(*LAYERS[:2]), models.ids),
    "tied in the root": Case(lambda: Language(499, 251, tied=True), decisions(*LAYERS[:2]), models.ids),
    "tied in a list": Case(
        lambda: Language(499, 251, tied=True), decisions(("embed", "head"), *LAYERS[:2]), models.ids
    ),
    "called twice": Case(Twice, decisions(("shared",), ("other",))),
    "called twice, kept": Case(Twice, decisions((("shared",), False), ("other",))),
    "never called": Case(Partly, decisions(("used",), ("never",), ("partial",))),
    "never called, unused reduced": Case(Partly, decisions(("used",), ("never",), ("partial",), reduce_unused=True)),
    "never called, in a list": Case(Partly, decisions(("used", "never"), ("partial",))),
    "frozen and in another dtype": Case(models.mixed, decisions(*LAYERS[:3])),
    "frozen and in another dtype, bf16": Case(models.mixed, decisions(*LAYERS[:3], **BF16)),
    "fewer rows than shards": Case(models.few_rows, decisions(*LAYERS[:2], shards=64)),
    "replicated": Case(_nested, decisions(*NESTED, replicated=("layers.0.before", "layers.1.scale"))),
    "replicated, replicas": Case(
        lambda: Chain(Mlp(499), Mlp(251), head=True), decisions(*LAYERS[:2], replicas=2, replicated=("head",))
    ),
    "table read by every layer": Case(models.Positions, decisions(("table",), *LAYERS[:3])),
    "list across others": Case(
        lambda: Language(499, 251), decisions(*LAYERS[:2], ("embed", "norm", "head")), models.ids
    ),
    "outputs kept": Case(models.KeepsOutputs, decisions(*LAYERS[:2])),
    "an input passed twice": Case(models.Pair, decisions(("layers.0",), ("layers.1",)), models.twice),
    "an input passed twice, bf16": Case(models.Pair, decisions(("layers.0",), ("layers.1",), **BF16), models.twice),
    "buffers": Case(models.buffered, decisions(*LAYERS[:2])),
    "no gradient for the first": Case(models.Halted, decisions(*LAYERS[:3])),
    "recomputing": Case(models.Recomputing, decisions(*LAYERS[:2])),
    "recomputing, units inside": Case(
        models.Recomputing,
        decisions(*((f"layers.{index}.inner.{inner}",) for index in range(2) for inner in range(2)), *LAYERS[:2]),
    ),
    "recomputing, only units inside": Case(
        models.Recomputing,
        decisions(*((f"layers.{index}.inner.{inner}",) for index in range(2) for inner in range(2)), **BF16),
    ),
    "deferred": Case(Branches, decisions(*((f"branches.{index}",) for index in range(3)))),
}


def _question(plan: Decisions, optimizer: str) -> Question:
    return resolve(Request(device="cpu", devices=plan.num_devices, optimizer=optimizer, precision="fp32"))


def _graph(case: Case) -> ModelGraph:
    dtype = "bfloat16" if case.plan.precision.param == "bfloat16" else "float32"
    return capture(case.build(), (case.inputs(), {}), loss=models.mean_square, compute_dtype=dtype, device_kind="cpu")


@pytest.fixture(params=CASES, ids=lambda name: name.replace(", ", "-").replace(" ", "_"), scope="module")
def both(request: pytest.FixtureRequest) -> tuple[Timeline, Measured]:
    torch.manual_seed(0)
    case = CASES[request.param]
    measured = measure(case.build, case.plan, case.inputs(), models.mean_square, case.optimizer)
    return simulate(_graph(case), case.plan, _question(case.plan, case.optimizer)), measured


def test_bytes(both: tuple[Timeline, Measured]) -> None:
    timeline, measured = both
    projected = {
        "forward peak": timeline.phase_peak_bytes("forward"),
        "after forward": timeline.phase_end_bytes("forward"),
        "backward peak": timeline.phase_peak_bytes("backward"),
        "after backward": timeline.phase_end_bytes("backward"),
        "optimizer peak": timeline.phase_peak_bytes("optimizer"),
    }
    found = {
        "forward peak": measured.forward_peak,
        "after forward": measured.after_forward,
        "backward peak": measured.backward_peak,
        "after backward": measured.after_backward,
        "optimizer peak": measured.optimizer_peak,
    }
    allowed = TOLERANCE * max(found.values())
    wrong = {name: (projected[name], found[name]) for name in found if abs(projected[name] - found[name]) > allowed}
    assert not wrong, f"(projected, measured): {wrong}"


def test_steady_bytes_are_exact(both: tuple[Timeline, Measured]) -> None:
    timeline, measured = both
    assert timeline.steady_bytes == measured.steady


def test_collectives_are_the_ones_issued(both: tuple[Timeline, Measured]) -> None:
    timeline, measured = both
    projected = [(found.kind, found.num_bytes, found.dtype) for found in timeline.collectives()]
    assert projected == list(measured.collectives)
