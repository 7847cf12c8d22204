"""Code that asks for the very class of a module is found by what it does when classes are exchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.analysis import analyze
from autoshard.capture import capture
from autoshard.capture.exact_type import may_ask
from autoshard.capture.tree import ModuleTree
from tests.models import floats


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Net(nn.Module):
    run: Callable[[Any, Any, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


def net(run: Callable[[Any, Any, Tensor], Tensor]) -> Net:
    """A net whose class has ``run`` as a method, so that it is code that the forward reaches."""
    kind: type[Net] = type("Kind", (Net,), {"run": run})
    return kind()


TABLE: dict[type, Callable[[Any, Tensor], Tensor]] = {Layer: lambda layer, x: layer(x)}


def helper(layer: nn.Module) -> bool:
    return type(layer) is Layer


ASKS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "type is": lambda self, layer, x: layer(x) if type(layer) is Layer else x,
    "class is": lambda self, layer, x: layer(x) if layer.__class__ == Layer else x,
    "table": lambda self, layer, x: TABLE.get(type(layer), lambda layer, x: x)(layer, x),
    "in a helper": lambda self, layer, x: layer(x) if helper(layer) else x,
    "another number": lambda self, layer, x: layer(x) * (2 if type(layer) is Layer else 3),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_layer_whose_class_is_asked_for(name: str) -> None:
    model = net(ASKS[name])
    graph = capture(model, ((floats(2, 4),), {}))
    assert [node.fqn for node in graph.modules if "exact-type" in node.traits] == ["layers.0", "layers.1"]
    assert type(model.layers[0]) is Layer
    space = analyze(graph, num_shards=2).space
    assert {"layers.0", "layers.1"} & {atom.module for atom in space.atoms} == set()
    assert {"layers.0.lin", "layers.1.lin", "head"} <= {atom.module for atom in space.atoms}
    (found,) = [each for each in space.diagnostics if each.code == "AS227"]
    assert (found.where, found.severity) == ("layers.0", "warning")


HARMLESS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "isinstance": lambda self, layer, x: layer(x) if isinstance(layer, Layer) else x,
    "the name": lambda self, layer, x: layer(x) if type(layer).__name__ == "Layer" else x,
    "the name of the class": lambda self, layer, x: layer(x) if layer.__class__.__name__ == "Layer" else x,
    "a class that is asked and ignored": lambda self, layer, x: layer(x) if type(layer) is not int else x,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_depend_on_the_class(name: str) -> None:
    graph = capture(net(HARMLESS[name]), ((floats(2, 4),), {}))
    assert not any("exact-type" in node.traits for node in graph.modules)


def test_a_root_whose_class_is_asked_for_is_refused() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) * (2 if type(self) is Root else 1)

    graph = capture(Root(), ((floats(2, 4),), {}))
    (found,) = [each for each in analyze(graph, num_shards=2).space.diagnostics if each.code == "AS227"]
    assert (found.where, found.severity) == ("(root)", "error")


@pytest.mark.parametrize(
    ("model", "asks"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(4, 2)), False),
        (net(HARMLESS["the name"]), False),
        (net(ASKS["type is"]), True),
    ],
)
def test_only_code_that_may_ask_is_run_again(model: nn.Module, asks: bool) -> None:
    assert may_ask(ModuleTree(model), "forward") == asks


def test_random_numbers_are_the_same_in_both_runs() -> None:
    def run(self: Any, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) * float(torch.rand(())) if type(layer) is not int else x

    graph = capture(net(run), ((floats(2, 4),), {}))
    assert not any("exact-type" in node.traits for node in graph.modules)
