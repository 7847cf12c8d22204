"""Second references to parameters: found wherever they are kept, and told apart by whether the step reads them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from autoshard.analysis import analyze
from autoshard.capture import capture
from autoshard.capture.aliases import find_aliases
from autoshard.capture.tree import ModuleTree
from autoshard.errors import CaptureError
from autoshard.ir import ParamInfo
from autoshard.plan import Axis, Decisions, Precision, Unit
from autoshard.verify import verify_plan
from tests.models import floats

Keep = Callable[[nn.Module, nn.Parameter], Any]
Read = Callable[[nn.Module], torch.Tensor]


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class Holder(Slotted):
    """Has a dictionary of its own beside the slot."""


class Named(NamedTuple):
    weight: torch.Tensor


ELSEWHERE: dict[str, torch.Tensor] = {}

KEPT: dict[str, tuple[Keep, Read, str]] = {
    "list": (lambda m, p: [p], lambda m: m.kept[0], "kept[0]"),
    "dictionary": (lambda m, p: {"w": p}, lambda m: m.kept["w"], "kept['w']"),
    "deep": (lambda m, p: {"a": [(1, {"w": p})]}, lambda m: m.kept["a"][0][1]["w"], "kept['a'][0][1]['w']"),
    "slot": (lambda m, p: Slotted(p), lambda m: m.kept.weight, "kept.weight"),
    "object": (lambda m, p: Holder(p), lambda m: m.kept.weight, "kept.weight"),
    "named tuple": (lambda m, p: Named(p), lambda m: m.kept.weight, "elsewhere"),
    "set": (lambda m, p: {p}, lambda m: next(iter(m.kept)), "elsewhere"),
    "partial": (lambda m, p: functools.partial(torch.add, p), lambda m: m.kept(0.0), "elsewhere"),
    "closure": (lambda m, p: lambda: p, lambda m: m.kept(), "kept.p"),
    "data": (lambda m, p: p.data, lambda m: m.kept, "kept"),
    "view": (lambda m, p: [p.detach().t()], lambda m: m.kept[0].t(), "kept[0]"),
    "global name": (lambda m, p: ELSEWHERE.update(w=p), lambda m: ELSEWHERE["w"], "elsewhere"),
}


class Model(nn.Module):
    def __init__(self, name: str, reads: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4, 4))
        keep, self.read, _ = KEPT[name]
        self.reads = reads
        self.__dict__["kept"] = keep(self, self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ (self.read(self) + self.scale if self.reads else self.scale)


def _scale(model: nn.Module) -> ParamInfo:
    graph = capture(model, ((floats(2, 4),), {}))
    return next(param for param in graph.params if param.key == "scale")


@pytest.mark.parametrize("name", sorted(KEPT))
def test_a_read_is_seen_with_its_place(name: str) -> None:
    model = Model(name, reads=True)
    held = model.kept
    param = _scale(model)
    assert "read-by-alias" in param.traits
    assert KEPT[name][2] in param.kept_in[0]
    assert model.kept is held
    assert model.scale.grad is None
    assert {alias.tensor.data_ptr() for alias in find_aliases(ModuleTree(model))} <= {model.scale.data_ptr()}


@pytest.mark.parametrize("name", sorted(set(KEPT) - {"global name"}))
def test_what_is_only_kept_is_a_note(name: str) -> None:
    param = _scale(Model(name, reads=False))
    assert "read-by-alias" not in param.traits
    assert len(param.kept_in) == 1


@pytest.mark.parametrize(("trains", "severity"), [(True, "error"), (False, "warning")])
def test_a_read_of_what_trains_is_refused_by_name(trains: bool, severity: str) -> None:
    model = Model("list", reads=True)
    model.scale.requires_grad_(trains)
    graph = capture(model, ((floats(2, 4),), {}))
    analysis = analyze(graph, num_shards=2)
    (found,) = [each for each in analysis.space.diagnostics if each.code == "AS221"]
    assert (found.where, found.severity) == ("scale", severity)
    assert "kept[0]" in found.message
    axis = Axis(name="shard", size=2, role="shard")
    root = Unit(modules=("",), reshard=False, num_params=3, num_bytes=144, digest="0" * 16)
    plan = Decisions(mesh=(axis,), precision=Precision(), units=(root,))
    assert ("AS221" in {each.code for each in verify_plan(plan, graph, analysis)}) == trains


def test_only_the_shape_is_asked_for() -> None:
    model = Model("list", reads=False)
    model.read = lambda m: m.scale  # type: ignore[assignment]
    model.forward = lambda x: model.inner(x) @ model.scale.view(model.kept[0].shape)  # type: ignore[method-assign]
    assert "read-by-alias" not in _scale(model).traits


def test_weights_that_a_module_renews_itself_are_none() -> None:
    """``nn.LSTM`` runs on a list of its weights, which its ``__setattr__`` keeps up to date."""
    graph = capture(nn.LSTM(4, 4), ((floats(3, 2, 4),), {}), loss=lambda outputs: outputs[0].sum())
    assert all(param.readers and not param.kept_in for param in graph.params)


def test_modules_and_what_they_hold_are_no_aliases() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.order = [model[1], model[0]]
    model.owner = {"self": model}
    assert find_aliases(ModuleTree(model)) == ()


def test_a_closure_on_meta_is_refused_by_name() -> None:
    """No gradient can be taken there."""
    with torch.device("meta"):
        model = Model("partial", reads=True)
    with pytest.raises(CaptureError, match=r"AS221: it reads the parameter scale through"):
        capture(model, ((torch.zeros(2, 4),), {}))
