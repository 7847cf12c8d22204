"""A teacher that follows its student inside forward: both are sharded while the root's code runs."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.analysis import analyze
from autoshard.capture import capture
from autoshard.plan import decisions_of
from autoshard.runtime import apply_plan
from autoshard.verify import verify_plan
from tests.runtime.plans import decide
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.slow

REQUEST = autoshard.Request(device="cpu", devices=2)


class Pair(nn.Module):
    def __init__(self, gain: bool = False) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        with torch.no_grad():
            for param in self.teacher.parameters():
                param.add_(0.5)
        if gain:
            self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.mul_(0.8).add_(new, alpha=0.2)
            target = self.teacher(x)
        found = self.student(x) - target
        return (found * self.gain if hasattr(self, "gain") else found).square().mean()


def _inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def _plan(**options: object) -> autoshard.Plan:
    request = autoshard.Request(device="cpu", devices=2, root_percent=0, **options)  # type: ignore[arg-type]
    return autoshard.make_plan(Pair(), inputs=((_inputs(0, 0),), {}), request=request)


@pytest.mark.parametrize("reshard", ["auto", "never"])
def test_what_is_updated_is_owned_below_the_root_and_resharded(reshard: str) -> None:
    plan = _plan(reshard=reshard)
    assert plan.units[-1].num_params == 0
    assert all(unit.reshard for unit in plan.units[:-1])
    assert {d.code for d in plan.diagnostics if d.where.startswith("teacher")} == {"AS240"}


@pytest.mark.parametrize(
    ("units", "places"),
    [
        ([(("",), False)], {"student.0.weight", "teacher.0.weight"}),
        ([(("student",), True), (("teacher",), False), (("",), False)], {"teacher.0.weight"}),
        ([(("student",), True), (("teacher",), True), (("",), False)], set()),
    ],
)
def test_the_verifier_sees_an_update_that_would_be_lost(
    units: list[tuple[tuple[str, ...], bool]], places: set[str]
) -> None:
    graph = capture(Pair(), ((_inputs(0, 0),), {}))
    found = verify_plan(decide(Pair(), units), graph, analyze(graph, num_shards=2))
    errors = [d for d in found if d.severity == "error"]
    assert {d.code for d in errors} == ({"AS240"} if places else set())
    assert all(any(place.split(".")[0] in f"{d.where} {d.message}" for d in errors) for place in places)


def test_an_update_that_mixes_other_tensors_is_none_of_these() -> None:
    class Noisy(Pair):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for old in self.teacher.parameters():
                    old.add_(torch.randn_like(old))
            return (self.student(x) - self.teacher(x)).square().mean()

    graph = capture(Noisy(), ((_inputs(0, 0),), {}))
    space = analyze(graph, num_shards=2).space
    assert space.must_reshard == ()
    assert "AS216" in {d.code for d in space.diagnostics}


def _train(rank: int, world: int) -> tuple[list[float], float]:
    """Losses of the reference and of the sharded model in turn, and the greatest difference of a teacher's weight."""
    torch.manual_seed(1)
    reference = Pair()
    torch.manual_seed(1)
    model = apply_plan(Pair(), decisions_of(_plan()))
    optimizers = [torch.optim.SGD(one.student.parameters(), lr=0.1) for one in (reference, model)]
    losses = []
    for step in range(3):
        # The forward updates the teacher, so the reference may run once a step: all ranks have the same inputs.
        for one, optimizer in zip((reference, model), optimizers, strict=True):
            loss = one(_inputs(step, 0))
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    gaps = []
    for found, expected in zip(model.teacher.parameters(), reference.teacher.parameters(), strict=True):
        assert isinstance(found, DTensor)
        gaps.append((found.full_tensor() - expected).abs().max().item())
    return losses, max(gaps)


def test_the_teacher_follows_as_in_one_process() -> None:
    for losses, gap in run_ranks(_train):
        assert losses[1::2] == pytest.approx(losses[::2], rel=1e-5)
        assert gap < 1e-6
