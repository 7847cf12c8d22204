"""Floating point operations against sums written out by hand."""

import pytest
import torch
from torch import nn

from autoshard.capture import capture
from tests.models import HIDDEN, VOCAB, build, floats


def _flops(name: str) -> tuple[int, int]:
    model, inputs = build(name)
    region = capture(model, inputs).root
    return sum(op.flops for op in region.forward), sum(op.flops for op in region.backward)


def test_linear_layers() -> None:
    forward, backward = _flops("giant")
    layers = 2 * 4 * (7 * 11 + 11 * 1009 + 1009 * 3)
    assert forward == layers
    assert backward == 2 * layers - 2 * 4 * 7 * 11  # no gradient of the inputs


def test_recurrent_layers_count_both_products() -> None:
    forward, _ = _flops("recurrent")
    positions, gates = 2 * 5, 4 * HIDDEN
    assert forward == 2 * (2 * positions * gates * (HIDDEN + HIDDEN)) + 2 * positions * HIDDEN * 3


def test_convolution() -> None:
    forward, _ = _flops("convolutional")
    assert forward == 2 * (2 * 6 * 6) * 8 * (3 * 3 * 3) + 2 * 2 * 8 * 5


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_attention(device_kind: str) -> None:
    model, inputs = build("attention")
    graph = capture(model, inputs, compute_dtype="bfloat16", device_kind=device_kind)
    batch, length = 2, 6
    projections = 2 * batch * length * HIDDEN * (3 * HIDDEN + HIDDEN + 3)
    scores = 2 * (2 * batch * length * length * HIDDEN)
    assert sum(op.flops for op in graph.root.forward) == projections + scores


def test_grouped_products() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 16, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            offsets = torch.tensor([8, 16, 24], dtype=torch.int32)
            return torch._grouped_mm(x, self.weight, offs=offsets)

    region = capture(Grouped(), ((floats(24, 16),), {}), compute_dtype="bfloat16").root
    assert sum(op.flops for op in region.forward) == 2 * 24 * 16 * 32
    assert sum(op.flops for op in region.backward) == 2 * 24 * 16 * 32  # the weight's; the inputs need none


def test_bytes_of_ops() -> None:
    model, inputs = build("language_model")
    graph = capture(model, inputs)
    (table,) = [op for op in graph.root.forward if op.target == "aten.embedding.default"]
    picked = 2 * 7 * HIDDEN * 4
    assert table.bytes_read == picked + 2 * 7 * 8  # rows, not the whole table, and the ids
    assert table.bytes_written == picked
    assert table.params == ("embed.weight",)
    product = next(op for op in graph.root.forward if op.module == "head" and op.flops)
    assert product.flops == 2 * 14 * HIDDEN * VOCAB
    assert product.bytes_read == 4 * (14 * HIDDEN + HIDDEN * VOCAB)
    assert product.bytes_written == 4 * 14 * VOCAB
    for op in (*graph.root.forward, *graph.root.backward):
        if op.is_view:
            assert (op.bytes_read, op.bytes_written, op.flops) == (0, 0, 0)
