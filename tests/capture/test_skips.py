"""Blocks that are left out where a step is run again: what comes out is what running them all tells."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import capture
from autoshard.capture.outline.skips import Skips

NUM_LAYERS, NUM_EXPERTS, DIM = 6, 5, 8


class Expert(nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Up, down."""
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    """Experts on the rows that chose them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gate = kind, nn.Linear(DIM, NUM_EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """By kind: rows are looked for, an empty choice is left out, a layer may hand on what it got."""
        if self.kind == "hands on" and x.sum() > 0:
            return x
        scores = self.gate(x).softmax(-1)
        chosen, out = scores.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if self.kind == "leaves out" and rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * scores[rows, number, None])
        return x + out


def experts(kind: str) -> tuple[nn.Module, Any]:
    """A model and its inputs."""
    model = nn.Sequential(nn.Linear(DIM, DIM), *(Layer(kind) for _ in range(NUM_LAYERS)))
    return model, ((torch.randn(6, DIM),), {})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["always", "leaves out", "hands on"])
def test_what_is_left_out_would_have_told_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = experts(kind)
    full = capture(model, inputs, outline=False)
    ran, original = [], Skips._watched

    def watched(self: Skips, fqn: str, *args: Any) -> Any:
        ran.append(fqn)
        return original(self, fqn, *args)

    monkeypatch.setattr(Skips, "_watched", watched)
    outlined = capture(model, inputs)
    assert outlined.modules == full.modules
    assert outlined.params == full.params
    assert outlined.regions == full.regions
    if kind in ("always", "leaves out"):
        assert any(outline.num_replayed == NUM_LAYERS for outline in outlined.outlines)
        layers = [fqn for fqn in ran if fqn.count(".") == 0]
        assert 0 < len(layers) < 2 * NUM_LAYERS, "of two runs"
    if kind == "leaves out":
        assert any("by-value" in node.traits for node in outlined.modules)
