"""Projected against measured: micro-batches, forms of the optimizer, gradients left as zeros, clipping, first steps.

The measured side drives torch by hand: ``set_requires_gradient_sync``, torch's own optimizers, ``zero_grad``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import capture
from autoshard.plan import Decisions
from autoshard.request import Request, resolve
from autoshard.runtime import clip_grad_norm_
from autoshard.simulate import Timeline, simulate
from tests.simulate import models
from tests.simulate.livebytes import Collectives
from tests.simulate.measured import Loop, Measured, decisions, fake_group, measure, shard
from tests.simulate.models import Chain, Language, Mlp, Outer, Twice, frozen

pytestmark = pytest.mark.slow

TOLERANCE = 0.001
LAYERS = tuple((f"layers.{index}",) for index in range(4))
BF16 = {"param": "bfloat16", "reduce": "float32"}


@dataclass(frozen=True)
class Case:
    """A model, a plan and a loop."""

    build: Callable[[], nn.Module]
    plan: Decisions
    loop: Loop = field(default_factory=Loop)
    optimizer: str = "adamw"
    inputs: Callable[[], tuple[Any, ...]] = models.floats


def _chain(head: bool = False) -> nn.Module:
    return Chain(Mlp(499), Mlp(997), Mlp(251), Mlp(499), head=head)


def _replicated() -> nn.Module:
    return Chain(Mlp(499), Mlp(251), head=True)


def _three(sync: str, **options: Any) -> Decisions:
    return decisions(*LAYERS, micro_batches=3, gradient_sync=sync, **options)


CASES = {
    "reduced in each": Case(_chain, _three("every")),
    "reduced in each, bf16": Case(_chain, _three("every", **BF16)),
    "reduced in each, replicas": Case(_chain, _three("every", replicas=2, shards=4)),
    "reduced in each, replicas, bf16": Case(_chain, _three("every", replicas=2, shards=4, **BF16)),
    "reduced in each, root with parameters": Case(lambda: _chain(head=True), _three("every", **BF16)),
    "reduced in the last": Case(_chain, _three("last")),
    "reduced in the last, bf16": Case(_chain, _three("last", **BF16)),
    "reduced in the last, bf16 reduced in bf16": Case(_chain, _three("last", param="bfloat16")),
    "reduced in the last, reduced in bf16": Case(_chain, _three("last", reduce="bfloat16")),
    "reduced in the last, replicas, bf16": Case(_chain, _three("last", replicas=2, shards=4, **BF16)),
    "reduced in the last, root with parameters": Case(lambda: _chain(head=True), _three("last", **BF16)),
    "reduced in the last, kept": Case(
        _chain, decisions(*((layer, False) for layer in LAYERS), micro_batches=2, gradient_sync="last", **BF16)
    ),
    "reduced in the last, frozen layers": Case(lambda: frozen(_chain(), "layers.1.up", "layers.2"), _three("last")),
    "reduced in the last, sharded along dim 1": Case(
        _chain, _three("last", shard_dims={"layers.0.up.weight": 1, "layers.2.up.weight": 1}, **BF16)
    ),
    "reduced in the last, called twice": Case(
        Twice, decisions(("shared",), ("other",), micro_batches=2, gradient_sync="last", **BF16)
    ),
    "called twice, replicas": Case(Twice, decisions(("shared",), ("other",), shards=4, replicas=2)),
    "reduced in the last, embedding": Case(
        lambda: Language(499, 251),
        decisions(("embed",), *LAYERS[:2], (("norm", "head"), False), micro_batches=2, gradient_sync="last", **BF16),
        inputs=models.ids,
    ),
    "replicated": Case(
        _replicated, decisions(*LAYERS[:2], replicated=("head",), micro_batches=3, gradient_sync="every")
    ),
    "nested": Case(
        lambda: Chain(Outer(Mlp(499), Mlp(251)), Mlp(997)),
        decisions(("layers.0.inner.0",), ("layers.0",), ("layers.1",), micro_batches=2, gradient_sync="last", **BF16),
    ),
    "zeros": Case(_chain, decisions(*LAYERS), Loop(set_to_none=False)),
    "zeros, bf16": Case(_chain, decisions(*LAYERS, **BF16), Loop(set_to_none=False)),
    "zeros, replicas": Case(_chain, decisions(*LAYERS, shards=4, replicas=2), Loop(set_to_none=False)),
    "zeros, replicated": Case(_replicated, decisions(*LAYERS[:2], replicated=("head",)), Loop(set_to_none=False)),
    "first": Case(_chain, decisions(*LAYERS), Loop(is_first=True)),
    "first, bf16": Case(_chain, decisions(*LAYERS, **BF16), Loop(is_first=True), "adamw-foreach"),
    "first, momentum": Case(_chain, decisions(*LAYERS), Loop(is_first=True), "sgd-momentum"),
    "first, zeros": Case(_chain, decisions(*LAYERS), Loop(is_first=True, set_to_none=False), "sgd-momentum"),
    "foreach": Case(_chain, decisions(*LAYERS), optimizer="adamw-foreach"),
    "foreach, two dtypes": Case(models.mixed, decisions(*LAYERS[:3]), optimizer="adamw-foreach"),
    "fused": Case(_chain, decisions(*LAYERS), optimizer="adamw-fused"),
    "for-loop": Case(_chain, decisions(*LAYERS), optimizer="adamw-for-loop"),
    "clipped": Case(_chain, decisions(*LAYERS), Loop(clips=True), "sgd"),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(", ", "-").replace(" ", "_"), scope="module")
def both(request: pytest.FixtureRequest) -> tuple[Timeline, Measured]:
    torch.manual_seed(0)
    case = CASES[request.param]
    measured = measure(case.build, case.plan, case.inputs(), models.mean_square, case.optimizer, loop=case.loop)
    dtype = "bfloat16" if case.plan.precision.param == "bfloat16" else "float32"
    inputs = (case.inputs(), {})
    graph = capture(case.build(), inputs, loss=models.mean_square, compute_dtype=dtype, device_kind="cpu")
    question = resolve(
        Request(
            device="cpu",
            devices=case.plan.num_devices,
            optimizer=case.optimizer,
            precision="fp32",
            clip=case.loop.clips,
            zero_grad="none" if case.loop.set_to_none else "zeros",
        )
    )
    return simulate(graph, case.plan, question, is_first=case.loop.is_first), measured


def test_bytes(both: tuple[Timeline, Measured]) -> None:
    timeline, measured = both
    projected = Measured(
        steady=sum(timeline.start.live) - timeline.setup.profile.input_bytes - timeline.setup.profile.between[0],
        forward_peak=timeline.phase_peak_bytes("forward"),
        after_forward=timeline.phase_end_bytes("forward"),
        backward_peak=timeline.phase_peak_bytes("backward"),
        after_backward=timeline.phase_end_bytes("backward"),
        optimizer_peak=timeline.phase_peak_bytes("optimizer"),
        after=timeline.phase_end_bytes("optimizer"),
        # torch's own clipping, which the measured loop calls, takes another way; ours is compared below.
        collectives=tuple(
            (found.kind, found.num_bytes, found.dtype) for found in timeline.collectives() if found.phase != "optimizer"
        ),
    )
    assert projected.collectives == measured.collectives
    allowed = TOLERANCE * max(measured.forward_peak, measured.backward_peak, measured.optimizer_peak)
    sizes = {name: (getattr(projected, name), getattr(measured, name)) for name in Measured.sizes()}
    assert not {name: pair for name, pair in sizes.items() if abs(pair[0] - pair[1]) > allowed}


@pytest.mark.parametrize(
    ("build", "plan"),
    [
        (_chain, decisions(*LAYERS)),
        (_chain, decisions(*LAYERS, **BF16)),
        (_chain, decisions(*LAYERS, replicas=2, shards=4)),
        (_replicated, decisions(*LAYERS[:2], replicated=("head",))),
        (lambda: frozen(_chain(), "layers"), decisions(*LAYERS)),
    ],
)
def test_clipping_issues_what_is_listed(build: Callable[[], nn.Module], plan: Decisions) -> None:
    x = models.floats()[0].requires_grad_()
    graph = capture(build(), ((x,), {}), loss=models.mean_square, compute_dtype="float32", device_kind="cpu")
    asked = Request(device="cpu", devices=plan.num_devices, optimizer="sgd", precision="fp32")
    plain, clipped = (simulate(graph, plan, resolve(replace(asked, clip=clip))) for clip in (False, True))
    listed = list(clipped.collectives())[len(list(plain.collectives())) :]
    with fake_group(plan.num_devices):
        model = build()
        shard(model, plan)
        models.mean_square(model(x)).backward()
        with Collectives() as issued:
            clip_grad_norm_(model, 1.0)
    assert [(one.kind, one.num_bytes, one.dtype) for one in listed] == issued.log
    assert len(issued.log) == any(param.requires_grad for param in model.parameters())
    assert {one.phase for one in listed} <= {"optimizer"}
