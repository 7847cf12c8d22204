"""A captured step holds exactly the bytes that the real step holds, op by op, on the cpu."""

import pytest
import torch

from autoshard.capture import capture
from autoshard.capture.loss import find_loss
from autoshard.ir.check import check
from tests.capture.memory import real_step, replay
from tests.models import MODELS, build

INEXACT = {
    "recurrent": "the kernel's workspace is not seen",
    "mixture": "which rows an expert gets depends on data",
}


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(INEXACT)))
def test_bytes_equal_those_of_a_real_step(name: str) -> None:
    model, (args, kwargs) = build(name)
    graph = capture(model, (args, kwargs))
    held, peak = real_step(model, args, kwargs, lambda outputs: find_loss(outputs, None)[0])
    assert held > 0
    assert replay(graph.root) == (held, peak)


def test_a_data_dependent_step_is_an_upper_bound() -> None:
    model, (args, kwargs) = build("mixture")
    held, peak = real_step(model, args, kwargs, lambda outputs: find_loss(outputs, None)[0])
    captured_held, captured_peak = replay(capture(model, (args, kwargs)).root)
    assert captured_held >= held
    assert captured_peak >= peak


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_graphs_are_sound(name: str, device: str) -> None:
    model, inputs = build(name, device)
    assert check(capture(model, inputs)) == ()


@pytest.mark.parametrize("name", ["tied", "checkpointing", "convolutional", "mixture"])
def test_two_captures_are_equal(name: str) -> None:
    model, inputs = build(name, "meta")
    first = capture(model, inputs, compute_dtype="bfloat16", device_kind="cuda")
    torch.rand(3)  # the state of the generator is no input
    assert capture(model, inputs, compute_dtype="bfloat16", device_kind="cuda") == first


def test_recomputation_keeps_less_and_is_marked() -> None:
    model, inputs = build("checkpointing")
    graph = capture(model, inputs)
    assert {node.fqn for node in graph.modules if "checkpointed" in node.traits} == {f"layers.{i}" for i in range(3)}
    again = [op for op in graph.root.backward if op.is_recompute]
    assert again
    assert {op.module.split(".")[0] for op in again} == {"layers"}
    assert not any(op.is_recompute for op in graph.root.forward)
    assert all(node.num_calls == 1 for node in graph.modules if node.has_forward)


def test_gradients_that_share_a_storage_are_listed_for_each_parameter() -> None:
    class Joined(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = torch.nn.Linear(4, 4, bias=False)
            self.k = torch.nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.cat([self.q.weight, self.k.weight]).t()

    graph = capture(Joined(), ((torch.randn(2, 4),), {}))
    gradients = {s.param: s.nbytes for s in graph.root.storages if s.kind == "gradient"}
    assert gradients == {"q.weight": 64, "k.weight": 64}
    assert check(graph) == ()


def test_half_precision_halves_activations() -> None:
    model, inputs = build("stack")
    full, _ = replay(capture(model, inputs).root)
    half, _ = replay(capture(model, inputs, compute_dtype="bfloat16").root)
    assert half < 0.6 * full
