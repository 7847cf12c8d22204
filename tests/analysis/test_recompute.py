"""Which blocks may recompute: each rule once on a hand-made graph, and on a captured one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.analysis.recompute import may_recompute, recomputable
from autoshard.capture import capture
from autoshard.ir import ModelGraph
from tests.graphs import Par, build, decoder, mod, stack
from tests.graphs import block as make_block

LAYERS = ("layers.0", "layers.1", "layers.2")


def _changed(graph: ModelGraph, fqn: str, **changes: Any) -> ModelGraph:
    return replace(
        graph, modules=tuple(replace(node, **changes) if node.fqn == fqn else node for node in graph.modules)
    )


def _span(graph: ModelGraph, fqn: str, **changes: Any) -> ModelGraph:
    spans = tuple(replace(span, **changes) if span.module == fqn else span for span in graph.root.spans)
    return replace(graph, regions=(replace(graph.root, spans=spans),))


def test_outermost_blocks_in_the_order_of_execution() -> None:
    found = recomputable(build(decoder(3)))
    assert found.modules == LAYERS
    assert found.diagnostics == ()


def test_blocks_that_run_backwards() -> None:
    layers = mod("layers", *(mod(str(index), weight=(3,)) for index in range(3)), has_forward=False)
    graph = build(mod("", layers, body=("layers.2", "layers.0", "layers.1")))
    assert may_recompute(graph) == ("layers.2", "layers.0", "layers.1")


@pytest.mark.parametrize(
    ("fqn", "changes", "reason"),
    [
        ("layers.1.attn", {"traits": ("batch-statistics",)}, "statistics over batches"),
        ("layers.1.attn.q", {"traits": ("checkpointed",)}, "recomputes by itself"),
        ("layers.1", {"traits": ("checkpointed",)}, "recomputes by itself"),
        ("layers.1.attn", {"traits": ("script",)}, "scripted"),
        ("layers.1", {"num_calls": 2}, "runs 2 times"),
    ],
)
def test_modules(fqn: str, changes: dict[str, Any], reason: str) -> None:
    found = recomputable(_changed(build(decoder(3)), fqn, **changes))
    assert found.modules == ("layers.0", "layers.2")
    (diagnostic,) = found.diagnostics
    assert (diagnostic.code, diagnostic.severity, diagnostic.where) == ("AS223", "note", "layers.1")
    assert reason in diagnostic.message


def test_inside_a_module_that_recomputes() -> None:
    found = recomputable(_changed(build(decoder(3)), "", traits=("checkpointed",)))
    assert found.modules == ()
    assert "the root recomputes" in found.diagnostics[0].message
    assert "and 2 more alike" in found.diagnostics[0].message


@pytest.mark.parametrize(
    ("changes", "reason"), [({"output_kind": "opaque:x.Box"}, "x.Box"), ({"escapes": True}, "used later")]
)
def test_results(changes: dict[str, Any], reason: str) -> None:
    found = recomputable(_span(build(decoder(3)), "layers.1", **changes))
    assert found.modules == ("layers.0", "layers.2")
    assert reason in found.diagnostics[0].message


def test_parameters_written_in_forward() -> None:
    graph = build(decoder(3))
    written = tuple(
        replace(param, traits=("written-in-forward",)) if param.owner == "layers.1.attn.q" else param
        for param in graph.params
    )
    assert may_recompute(replace(graph, params=written)) == ("layers.0", "layers.2")


def test_nothing_to_recompute() -> None:
    frozen = [mod(str(index), weight=Par(shape=(3,), requires_grad=False), no_grad=True) for index in range(2)]
    found = recomputable(
        build(mod("", mod("layers", *frozen, has_forward=False), stack("more", make_block(8), make_block(8))))
    )
    assert found.modules == ("more.0", "more.1")
    assert found.diagnostics == ()


def test_without_ops() -> None:
    assert may_recompute(replace(build(decoder(2)), frontend="tree", regions=())) == ()


class Adds(nn.Module):
    """Adds to its input, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(8, 8), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x * 2)
        return x.add_(y) if self.in_place else (x + 1).add_(y)


class Counts(nn.Module):
    """Counts its runs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.linear(x)


def _captured(*layers: nn.Module) -> ModelGraph:
    return capture(nn.Sequential(nn.Linear(8, 8), *layers), ((torch.ones(2, 8),), {}), loss=lambda out: out.sum())


def test_memory_from_before_is_not_written() -> None:
    assert may_recompute(_captured(Adds(False), Adds(False))) == ("1", "2")
    for found in (recomputable(_captured(Adds(True), Adds(True))), recomputable(_captured(Counts(), Counts()))):
        assert found.modules == ()
        assert "there before it ran" in found.diagnostics[0].message


def test_batch_norm() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)]
    found = recomputable(_captured(*layers))
    assert found.modules == ()
    assert "statistics" in found.diagnostics[0].message
