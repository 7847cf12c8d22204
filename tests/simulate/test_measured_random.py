"""Projected against measured over random trees of modules and random plans, seeded."""

import random

import pytest
import torch
from torch import nn

from autoshard.capture import capture
from autoshard.plan import Decisions
from autoshard.request import Request, resolve
from autoshard.simulate import simulate
from tests.simulate.measured import decisions, measure
from tests.simulate.models import HIDDEN, Chain, Mlp, Outer, mean_square

pytestmark = pytest.mark.slow

TOLERANCE = 0.001
"""Of the measured peak."""


def _layer(rng: random.Random, depth: int) -> nn.Module:
    if depth and rng.random() < 0.6:
        return Outer(*(_layer(rng, depth - 1) for _ in range(rng.randint(1, 3))))
    return Mlp(rng.choice((97, 251, 499, 997)))


def _model(seed: int) -> nn.Module:
    rng = random.Random(seed)
    model = Chain(*(_layer(rng, 2) for _ in range(rng.randint(2, 4))), head=rng.random() < 0.5)
    for _, param in model.named_parameters():
        param.requires_grad_(rng.random() < 0.85)
    return model


def _plan(seed: int) -> Decisions:
    rng = random.Random(1000 + seed)
    named = _post_order("", _model(seed))
    units = [((fqn,), rng.random() < 0.7) for fqn in named if rng.random() < 0.6]
    alone = [unit for unit in units if not any(unit[0][0].startswith(f"{other[0][0]}.") for other in units)]
    if len(alone) > 1 and rng.random() < 0.5:
        first, second = alone[0], alone[1]
        units = [unit for unit in units if unit not in (first, second)] + [((*first[0], *second[0]), first[1])]
    return decisions(
        *units,
        shards=rng.choice((2, 8, 64)),
        replicas=rng.choice((1, 1, 2)),
        root_reshard=rng.random() < 0.3,
        recompute=_recompute(rng, named, units),
        **rng.choice(({}, {"param": "bfloat16", "reduce": "float32"}, {"param": "bfloat16"})),
    )


def _recompute(rng: random.Random, named: list[str], units: list[tuple[tuple[str, ...], bool]]) -> tuple[str, ...]:
    """Modules that recompute, none inside another and no unit inside one of them."""
    chosen: list[str] = []
    members = [module for modules, _ in units for module in modules]
    for fqn in named:
        below = f"{fqn}."
        if not any(name.startswith(below) for name in [*members, *chosen]) and rng.random() < 0.4:
            chosen.append(fqn)
    return tuple(chosen)


def _post_order(path: str, module: nn.Module) -> list[str]:
    found = []
    for name, child in module.named_children():
        below = f"{path}.{name}".strip(".")
        found += _post_order(below, child)
        if isinstance(child, Mlp | Outer):
            found.append(below)
    return found


@pytest.mark.parametrize("tokens", [3, 307])
@pytest.mark.parametrize("seed", range(16))
def test_random_tree(seed: int, tokens: int) -> None:
    torch.manual_seed(0)
    plan = _plan(seed)
    inputs = (torch.ones(tokens, HIDDEN),)
    measured = measure(lambda: _model(seed), plan, inputs, mean_square, "adamw")
    dtype = "float32" if plan.precision.param == "same" else plan.precision.param
    graph = capture(_model(seed), (inputs, {}), loss=mean_square, compute_dtype=dtype, device_kind="cpu")
    timeline = simulate(graph, plan, resolve(Request(device="cpu", devices=plan.num_devices)))
    assert [(c.kind, c.num_bytes, c.dtype) for c in timeline.collectives()] == list(measured.collectives)
    assert timeline.steady_bytes == measured.steady
    pairs = [
        (timeline.phase_peak_bytes("forward"), measured.forward_peak),
        (timeline.phase_end_bytes("forward"), measured.after_forward),
        (timeline.phase_peak_bytes("backward"), measured.backward_peak),
        (timeline.phase_end_bytes("backward"), measured.after_backward),
        (timeline.phase_peak_bytes("optimizer"), measured.optimizer_peak),
    ]
    allowed = TOLERANCE * measured.backward_peak
    assert all(abs(projected - found) <= allowed for projected, found in pairs), pairs
