"""A graph from the module tree alone."""

import pytest
import torch
from torch import nn

from autoshard.capture import capture, capture_tree
from autoshard.ir.check import check
from tests.models import MODELS, Attention, build


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tree_and_trace_agree_on_names(name: str, device: str) -> None:
    model, inputs = build(name, device)
    tree, trace = capture_tree(model), capture(model, inputs)
    assert check(tree) == ()
    assert [node.fqn for node in tree.modules] == [node.fqn for node in trace.modules]
    assert [node.repeat_class for node in tree.modules] == [node.repeat_class for node in trace.modules]
    for mine, theirs in zip(tree.params, trace.params, strict=True):
        assert (mine.key, mine.aliases, mine.shape, mine.nbytes, mine.holders) == (
            theirs.key, theirs.aliases, theirs.shape, theirs.nbytes, theirs.holders,
        )  # fmt: skip
    assert tree.buffers == trace.buffers


def test_what_is_assumed() -> None:
    model = nn.Sequential(Attention(), nn.ModuleList([nn.Linear(2, 2)]))
    graph = capture_tree(model)
    calls = {node.fqn: node.num_calls for node in graph.modules}
    assert calls == {"": 1, "0": 1, "0.attn": 1, "0.attn.out_proj": 0, "0.head": 1, "1": 0, "1.0": 1}
    readers = {param.key: param.readers for param in graph.params}
    assert readers["0.attn.out_proj.weight"] == (("", "0", "0.attn"),)
    assert readers["1.0.weight"] == (("", "1.0"),)
    assert [(d.code, d.severity) for d in graph.diagnostics] == [("AS104", "warning")]
    assert graph.frontend == "tree"
    assert [op.module for op in graph.root.forward] == ["0.attn", "0.attn.out_proj", "0.head", "1.0"]
    assert [op.module for op in graph.root.backward] == ["1.0", "0.head", "0.attn.out_proj", "0.attn"]
    spans = {span.module: (span.forward, span.backward) for span in graph.root.spans}
    assert spans[""] == ((0, 4), (0, 4))
    assert spans["0.attn"] == ((0, 2), (2, 4))
    assert spans["1.0"] == ((3, 4), (0, 1))


def test_backward_makes_the_gradients_of_what_trains() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(5, 7, bias=False), "c": nn.Linear(5, 7, bias=False)})
    model["a"].bias.requires_grad = False
    model["c"].weight = model["b"].weight
    graph = capture_tree(model)
    found = {storage.param: (storage.nbytes, storage.born.index) for storage in graph.root.storages}
    assert found == {"a.weight": (3 * 5 * 4, 2), "b.weight": (5 * 7 * 4, 0)}
    assert [op.outputs for op in graph.root.backward] == [(0,), (0,), (1,)]  # a tie is added to by both
    assert not any(op.outputs for op in graph.root.forward)


def test_nothing_is_run() -> None:
    class Explodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    assert capture_tree(Explodes()).modules[0].num_calls == 1
