"""Micro-batches and clipping on two ranks give what one process gives; optimizers are what a request names."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard import accumulate, apply_plan, clip_grad_norm_, make_optimizer
from autoshard.errors import RequestError
from autoshard.plan import Decisions
from autoshard.request import OPTIMIZERS
from tests.runtime.models import Scaled, Stack, inputs, loss_of
from tests.runtime.plans import decide
from tests.runtime.ranks import run_ranks

MICRO_BATCHES = 3


@dataclass(frozen=True, kw_only=True)
class Step:
    """Greatest relative difference of gradients from the reference, norms, and reductions by micro-batch."""

    gradients: float
    norm: float
    expected_norm: float
    reductions: list[int]


def _plan(model: nn.Module, sync: str, **options: Any) -> Decisions:
    units = [(("body.0",), True)] if isinstance(model, Scaled) else [((f"layers.{i}",), True) for i in range(3)]
    made = decide(model, [*units, (("",), False)], **options)
    return msgspec.structs.replace(made, micro_batches=MICRO_BATCHES, gradient_sync=sync)


def _steps(rank: int, world: int) -> dict[str, Step]:
    cases = {
        "every": (Stack, "every", {}, 2.0),
        "last": (Stack, "last", {}, 2.0),
        "last, replicated": (Scaled, "last", {"replicated": ("scale",)}, 2.0),
        "every, replicated, largest": (Scaled, "every", {"replicated": ("scale",)}, float("inf")),
        "last, along dim 1": (Stack, "last", {"shard_dims": {"layers.0.expand.weight": 1}}, 3.0),
    }
    return {name: _step(rank, world, *case) for name, case in cases.items()}


def _step(rank: int, world: int, build: Any, sync: str, options: dict[str, Any], norm_type: float) -> Step:
    torch.manual_seed(3)
    reference = build()
    torch.manual_seed(3)
    model = build()
    plan = _plan(model, sync, **options)
    for batch in range(MICRO_BATCHES):
        for other in range(world):
            (loss_of(reference(inputs(reference, batch, other))) / world / MICRO_BATCHES).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
    apply_plan(model, plan)
    counts, original = [], dist.reduce_scatter_single
    dist.reduce_scatter_single = lambda *args, **kwargs: (counts.append(1), original(*args, **kwargs))[1]
    reductions = []
    for batch in accumulate(model, plan, range(MICRO_BATCHES)):
        before = len(counts)
        (loss_of(model(inputs(model, batch, rank))) / MICRO_BATCHES).backward()
        reductions.append(len(counts) - before)
    dist.reduce_scatter_single = original
    found = clip_grad_norm_(model, 0.01, norm_type)
    whole = {name: param.grad for name, param in model.named_parameters()}
    gaps = []
    for name, param in reference.named_parameters():
        grad = whole[name]
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert full is not None
        assert param.grad is not None
        gaps.append(((full - param.grad).abs().max() / param.grad.abs().max()).item())
    return Step(gradients=max(gaps), norm=found.item(), expected_norm=norm.item(), reductions=reductions)


@pytest.mark.slow
def test_micro_batches_and_clipping_equal_one_process() -> None:
    for steps in run_ranks(_steps, seconds=100):
        for name, step in steps.items():
            assert step.gradients <= 1e-5, name
            assert step.norm == pytest.approx(step.expected_norm, rel=1e-5), name
            assert step.norm > 0.01, name  # so that clipping has something to do
            num_units = 2 if "replicated" in name else 4
            expected = [num_units] * 3 if "every" in name else [0, 0, num_units]
            assert step.reductions == expected, name


def test_an_unsharded_model_is_clipped_as_torch_does() -> None:
    for norm_type in (1.0, 2.0, 3.5, float("inf")):
        grads = [torch.randn(7, 5), torch.randn(11).to(torch.bfloat16), torch.empty(0, 3)]
        models = [_with_grads(grads), _with_grads(grads)]
        found = clip_grad_norm_(models[0], 0.5, norm_type)
        expected = nn.utils.clip_grad_norm_([p for p in models[1].parameters() if p.numel()], 0.5, norm_type)
        assert found.item() == pytest.approx(expected.item(), rel=5e-3)  # torch sums bfloat16 in bfloat16
        for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-3)


def _with_grads(grads: list[torch.Tensor]) -> nn.Module:
    model = nn.Module()
    for index, grad in enumerate(grads):
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad.clone()
        model.register_parameter(f"p{index}", param)
    return model


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == 0


@pytest.mark.parametrize(("options", "field"), [({"max_norm": 0}, "max_norm"), ({"norm_type": 0.5}, "norm_type")])
def test_numbers_out_of_range_are_refused(options: dict[str, float], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        clip_grad_norm_(nn.Linear(2, 2), **{"max_norm": 1.0, **options})
    assert caught.value.field == field


def test_a_model_that_is_not_sharded_and_a_wrong_number_of_batches_are_refused() -> None:
    plan = _plan(Stack(), "last")
    with pytest.raises(RequestError, match="apply_plan"):
        next(accumulate(Stack(), plan, [1, 2, 3]))


@pytest.mark.slow
def test_a_wrong_number_of_batches_is_refused() -> None:
    assert run_ranks(_wrong_number) == [(2, "3, as many micro-batches as the plan has")] * 2


def _wrong_number(rank: int, world: int) -> tuple[int, str]:
    model = Stack()
    plan = _plan(model, "last")
    apply_plan(model, plan)
    with pytest.raises(RequestError) as caught:
        next(accumulate(model, plan, [1, 2]))
    return caught.value.value, caught.value.expected


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw-8bit"])
def test_optimizers_are_what_their_names_say(name: str) -> None:
    optimizer = make_optimizer(name, nn.Linear(2, 2).parameters(), lr=0.25)
    kind, _, form = name.partition("-")
    assert type(optimizer) is {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    defaults = optimizer.defaults
    assert defaults["lr"] == 0.25
    assert defaults.get("momentum", 0) == (0.9 if form == "momentum" else 0)
    assert defaults["fused"] is (True if form == "fused" else None)
    assert defaults["foreach"] is {"foreach": True, "for-loop": False}.get(form)


def test_an_unknown_optimizer_and_a_missing_library_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="adamw-foreach"):
        make_optimizer("lion", nn.Linear(2, 2).parameters())
    monkeypatch.setattr("autoshard.runtime.loop.find_spec", lambda name: None)
    with pytest.raises(RequestError, match="torchao"):
        make_optimizer("adamw-8bit", nn.Linear(2, 2).parameters())


def _adafactor(rank: int, world: int) -> str:
    model = Stack()
    apply_plan(model, decide(model, [(("",), False)]))
    loss_of(model(inputs(model, 0, rank))).backward()
    optimizer = torch.optim.Adafactor(model.parameters())
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_adafactor_raises_on_sharded_parameters_which_is_why_it_is_refused() -> None:
    """When this fails torch has mended it, and the request may take it."""
    for message in run_ranks(_adafactor):
        assert "in-place operations that require placement changes are not supported" in message
