"""Questions that a model asks of its data: exact where inputs tell, assumed and told where they do not."""

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.ir import ModelGraph
from tests.models import build, floats


class Asks(nn.Module):
    """Runs ``ask`` on integer inputs and goes on with the rows that it answers."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.ask = ask
        self.lin = nn.Linear(4, 4)
        self.register_buffer("sizes", torch.tensor([1, 2, 3]))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.lin(self.ask(self, x, tokens))


def _spread(x: torch.Tensor) -> torch.Tensor:
    """As wide as a model, so that a mask of it is too large to be kept but as a view."""
    return x[:, :1].expand(-1, 1 << 20)


def _rows(ask: Any) -> tuple[int, ModelGraph]:
    tokens = torch.tensor([5, 7, 5, 9, 5, 2])
    graph = capture(Asks(ask), ((floats(6, 4), tokens), {}))
    product = next(op for op in graph.root.forward if op.flops)
    return product.flops // (2 * 4 * 4), graph


@pytest.mark.parametrize(
    ("ask", "rows"),
    [
        (lambda m, x, t: x[t == 5], 3),
        (lambda m, x, t: _spread(x)[(t == 5)[:, None].expand(-1, 1 << 20)].view(-1, 1 << 20)[:, :4], 3),
        (lambda m, x, t: x[tuple(t[:2] - 5), tuple(t[:2] - t[:2])][:, None].expand(-1, 4), 2),
        (lambda m, x, t: x[(t == 5).nonzero().flatten()], 3),
        (lambda m, x, t: x[: int((t > 5).sum())], 2),
        (lambda m, x, t: x[: t.tolist()[-1]], 2),
        (lambda m, x, t: x.split(m.sizes.tolist())[1], 2),
        (lambda m, x, t: x if (t == 5).all() else x[:1], 1),
        (lambda m, x, t: x[: t.unique().numel()], 4),
        (lambda m, x, t: x[t.masked_select(t < 6)], 4),
        (lambda m, x, t: x[torch.repeat_interleave(torch.arange(2), t[:2])[: t[0]]], 5),
        (lambda m, x, t: x[: torch.tensor([t[0] - 1, t[1]]).min()], 4),
        (lambda m, x, t: x[: t.clone().fill_(3).max()], 3),
        (lambda m, x, t: x if torch.isnan(x).any() else x[:2], 2),
        (lambda m, x, t: x[: torch.bincount(t).numel()][:6], 6),
        (lambda m, x, t: x if torch.equal(t, t + 1) else x[:2], 2),
        (lambda m, x, t: x if torch.rand([]) < 0.4 else x[:2], 2),
    ],
)
def test_exact(ask: Any, rows: int) -> None:
    found, graph = _rows(ask)
    assert found == rows
    assert graph.diagnostics == ()


@pytest.mark.parametrize(
    ("ask", "rows", "op"),
    [
        (lambda m, x, t: x[x.sum(1) > 0], 6, "index"),
        (lambda m, x, t: x[(x.sum(1) > 0).nonzero().flatten()], 6, "nonzero"),
        (lambda m, x, t: x if x.sum() > 0 else x[:1], 6, "_local_scalar_dense"),
        (lambda m, x, t: x[: torch.bincount(x.argmax(1), minlength=4).numel()], 4, "bincount"),
        (lambda m, x, t: x if torch.equal(x, x + 1) else x[:2], 6, "equal"),
        (lambda m, x, t: x[: x.argmax().item()], 1, "_local_scalar_dense"),
        (lambda m, x, t: x.split((m.lin.weight[:2] > 0).sum(-1).tolist())[0], 3, "split"),
        (lambda m, x, t: x.flatten()[x.flatten() > 0].reshape(2, 4), 2, "reshape"),
    ],
)  # fmt: skip
def test_assumed_and_told(ask: Any, rows: int, op: str) -> None:
    found, graph = _rows(ask)
    assert found == rows
    assert {(d.code, d.severity, d.where) for d in graph.diagnostics} == {("AS102", "warning", "(root)")}
    assert any(op in d.message for d in graph.diagnostics)


def test_a_value_that_was_overwritten_is_not_used() -> None:
    def ask(module: nn.Module, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        part = tokens[:1]
        tokens.copy_(x.argmax(1).repeat(2)[:6])  # unknown from here on, for the view as well
        return x[: part.item()]

    found, graph = _rows(ask)
    assert found == 1
    assert [d.code for d in graph.diagnostics] == ["AS102"]


def test_experts_on_demand() -> None:
    model, inputs = build("mixture")
    graph = capture(model, inputs)
    assert all(node.num_calls == 1 for node in graph.modules if node.fqn.startswith("experts."))
    assert {d.where for d in graph.diagnostics} == {"(root)"}
    assert len(graph.diagnostics) == 1


@pytest.mark.parametrize("ask", [lambda m, x, t: x.split([1, 2])[0], lambda m, x, t: x.flatten().reshape(2, 4)])
def test_sizes_that_do_not_fit_are_an_error_where_nothing_was_assumed(ask: Any) -> None:
    with pytest.raises(CaptureError):
        _rows(ask)
