"""What is found by bisection is what trying every value finds; on a real model its neighbour has no plan."""

import random

import pytest
import torch
from torch import nn

from autoshard.errors import InfeasibleBudgetError
from autoshard.request import Request
from autoshard.studies import Subject, fewest_devices, largest_size, least_memory
from autoshard.studies.fit import device_counts
from tests.studies.subjects import GraphSubject, RuleSubject

REQUEST = Request(device="h100-80gb", devices=8, memory=1_000_000)


def test_device_counts() -> None:
    assert device_counts(8, 40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert device_counts(2, 7) == (1, 2, 4, 6)
    assert device_counts(6, 12) == (1, 2, 4, 6, 12)
    assert device_counts(8, 3) == (1, 2)


@pytest.mark.parametrize("total", [1, 999_999, 1_000_001, 7_900_000, 8_000_001, 60_000_000, 10**12])
def test_fewest_devices(total: int) -> None:
    subject = RuleSubject(lambda devices, batch, seq: -(-total // devices))
    found = fewest_devices(subject, REQUEST, most=64)
    fitting = [count for count in device_counts(8, 64) if total <= count * 1_000_000]
    assert found.value == min(fitting, default=None)
    assert (found.answer is None) == (not fitting)
    if found.value is not None and found.value > 1:
        assert found.error is not None
        assert found.beyond == max(count for count in device_counts(8, 64) if count < found.value)
    assert len(subject.asked) <= 6


@pytest.mark.parametrize("seed", range(20))
def test_largest_batch_and_sequence(seed: int) -> None:
    rng = random.Random(seed)
    base, each, step = rng.randint(0, 1_200_000), rng.randint(1, 90_000), rng.choice([1, 128])
    what, most = rng.choice(["batch", "seq"]), 5_000

    def needed(devices: int, batch: int, seq: int) -> int:
        return base + each * (batch if what == "batch" else seq)

    subject = RuleSubject(needed)
    found = largest_size(subject, REQUEST, what, step=step, most=most)  # type: ignore[arg-type]
    fitting = [size for size in range(step, most + 1, step) if base + each * size <= 1_000_000]
    assert found.value == max(fitting, default=None)
    assert len(subject.asked) == len(set(subject.asked)) <= 2 * 14
    if found.error is not None:
        assert found.beyond == (found.value or 0) + step
        assert found.error.smallest_bytes == base + each * found.beyond


def test_least_memory_is_exact_and_the_byte_before_has_no_plan() -> None:
    subject = GraphSubject()
    request = Request(device="h100-80gb", devices=4)
    found = least_memory(subject, request)
    assert found.value is not None
    assert found.answer is not None
    assert found.answer.found.timeline.peak_bytes == found.value
    assert found.beyond == found.value - 1
    assert found.error is not None
    assert found.error.smallest_bytes > found.beyond
    with pytest.raises(InfeasibleBudgetError):
        subject.ask(Request(device="h100-80gb", devices=4, memory=found.value - 1))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.slow
def test_a_real_model_is_captured_once_for_each_batch() -> None:
    stages: list[str] = []
    subject = Subject(
        _Net(), lambda batch, seq: ((torch.zeros(batch or 1, 32),), {}), progress=lambda stage: stages.append(stage)
    )
    request = Request(device="cpu", devices=2, memory="200KiB", recompute="none")
    found = largest_size(subject, request, "batch", most=512)
    assert found.value is not None
    assert found.beyond == found.value + 1
    subject.ask(request, batch=found.value)
    with pytest.raises(InfeasibleBudgetError):
        subject.ask(request, batch=found.beyond)
    captures = [stage for stage in stages if stage.startswith("capturing")]
    assert len(captures) == len(set(captures)) > 2
    subject.ask(Request(device="cpu", devices=4, memory="1GiB"), batch=found.value)
    assert len([stage for stage in stages if stage.startswith("capturing")]) == len(captures)


@pytest.mark.slow
def test_a_far_sequence_is_extrapolated() -> None:
    request = Request(device="h100-80gb", devices=2, memory="40GiB", precision="fp32", recompute="none")
    subject = Subject(_Net(), lambda batch, seq: ((torch.zeros(batch or 1, seq or 1, 32, device="meta"),), {}))
    far = subject.ask(request, seq=2**20).found.timeline.peak_bytes
    near = [subject.ask(request, seq=length).found.timeline.peak_bytes for length in (2**14, 2**15)]
    # Activations grow with the sequence and nothing else does; a plan may hold the parameters once more or less.
    each = (near[1] - near[0]) // 2**14
    assert abs(far - near[0] - each * (2**20 - 2**14)) <= sum(4 * param.numel() for param in _Net().parameters())
