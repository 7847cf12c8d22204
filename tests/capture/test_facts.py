"""What a captured graph says of modules, parameters, buffers, spans and ops."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.capture import capture
from autoshard.ir import LOSS, ModelGraph, ModuleSpan
from autoshard.ir.check import check
from tests.models import HIDDEN, VOCAB, Block, OnPath, Stack, build, floats, ids


def _param(graph: ModelGraph, key: str) -> Any:
    return next(param for param in graph.params if param.key == key)


def _module(graph: ModelGraph, fqn: str) -> Any:
    return next(node for node in graph.modules if node.fqn == fqn)


def _spans(graph: ModelGraph, fqn: str) -> list[ModuleSpan]:
    return [span for span in graph.root.spans if span.module == fqn]


def _capture(name: str, **options: Any) -> ModelGraph:
    model, inputs = build(name)
    return capture(model, inputs, **options)


def test_tied_parameters_are_one_with_an_alias() -> None:
    graph = _capture("tied")
    tied = _param(graph, "embed.weight")
    assert tied.aliases == ("head.weight",)
    assert tied.holders == ("embed", "head")
    assert tied.readers == (("", "embed"), ("", "head"))
    assert _module(graph, "head").own_params == ("embed.weight",)
    assert tied.nbytes == VOCAB * HIDDEN * 4
    assert not any(param.key == "head.weight" for param in graph.params)


def test_a_shared_module_has_one_name_and_two_calls() -> None:
    graph = _capture("shared")
    shared = _module(graph, "first")
    assert shared.aliases == ("second",)
    assert shared.num_calls == 2
    assert [len(_spans(graph, fqn)) for fqn in ("first", "between", "first.up")] == [2, 1, 2]
    assert _param(graph, "first.up.weight").aliases == ("second.up.weight",)
    assert _module(graph, "").children == ("first", "between")


def test_attention_reads_the_weights_of_a_child_that_it_never_calls() -> None:
    graph = _capture("attention")
    assert _module(graph, "attn.out_proj").num_calls == 0
    assert _param(graph, "attn.out_proj.weight").readers == (("", "attn"),)
    assert "multihead" in _module(graph, "attn").traits
    assert "dropout" not in _module(graph, "attn").traits


def test_a_functional_head_reads_a_view_from_the_root() -> None:
    assert _param(_capture("functional_head"), "embed.weight").readers == (("", "embed"), ("",))


class Reads(nn.Module):
    """Ways to touch the weight of a child."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3, bias=False)
        self.way = way

    def forward(self, x: torch.Tensor) -> Any:
        if self.way == "direct":
            return self.lin.forward(x)
        if self.way == "shape":
            return self.lin(x.to(self.lin.weight.dtype)) + x.new_ones(self.lin.weight.shape[0])
        if self.way == "like":
            return self.lin(x) + torch.zeros_like(self.lin.weight).sum()
        if self.way == "new":
            return self.lin(x) + self.lin.weight.new_ones(3)
        if self.way == "hook":
            x = x * 1.0
            x.register_hook(lambda grad: grad * self.lin.weight.sum())
            return self.lin(x)
        if self.way == "view":
            self.lin.weight.t()
            return self.lin(x)
        return self.lin(x), self.lin.weight


@pytest.mark.parametrize(
    ("way", "readers"),
    [
        ("direct", (("",),)),
        ("shape", (("", "lin"),)),
        ("like", (("", "lin"), ("",))),
        ("new", (("", "lin"), ("",))),
        ("hook", (("", "lin"), ("",))),
        ("view", (("", "lin"),)),
        ("loss", (("", "lin"), (LOSS,))),
    ],
)
def test_what_counts_as_a_read(way: str, readers: Any) -> None:
    loss = (lambda out: out[0].mean() + out[1].square().sum()) if way == "loss" else None
    graph = capture(Reads(way), ((floats(2, 3).requires_grad_(),), {}), loss=loss)
    assert _param(graph, "lin.weight").readers == readers
    assert _module(graph, "lin").num_calls == (0 if way == "direct" else 1)


def test_a_recomputed_read_is_the_read_of_the_first_run() -> None:
    graph = _capture("checkpointing")
    assert _param(graph, "layers.1.up.weight").readers == (("", "layers.1", "layers.1.up"),)


class Task(nn.Module):
    """Trains through ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(x) * self.scale, y)


def test_another_entry_runs_as_a_forward_of_the_root() -> None:
    inputs = ((floats(2, 3), torch.tensor([0, 1])), {})
    graph = capture(Task(), inputs, entry="training_step")
    assert graph.entry == "training_step"
    assert _module(graph, "").num_calls == 1
    assert _param(graph, "scale").readers == (("",),)
    assert _param(graph, "net.weight").readers == (("", "net"),)
    assert check(graph) == ()
    assert graph.loss == "outputs"


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    graph = _capture("frozen")
    assert {param.key for param in graph.params if param.gets_grad} == {"head.weight", "head.bias"}
    assert not _param(graph, "tower.head.weight").requires_grad
    span = _spans(graph, "head")[0]
    assert not span.inputs_need_grad
    assert span.output_needs_grad
    assert _spans(graph, "tower")[0].backward is None


def test_spans_nest_in_forward_and_mirror_in_backward() -> None:
    graph = _capture("language_model")
    first, second = _spans(graph, "layers.0")[0], _spans(graph, "layers.1")[0]
    inner = _spans(graph, "layers.0.up")[0]
    assert first.forward[1] <= second.forward[0]
    assert first.backward is not None
    assert second.backward is not None
    assert inner.backward is not None
    assert second.backward[1] <= first.backward[0]
    assert first.backward[0] <= inner.backward[0] < inner.backward[1] <= first.backward[1]
    root = _spans(graph, "")[0]
    assert root.forward[0] == 0
    assert root.output_kind == "dict"
    assert first.output_bytes == 2 * 7 * HIDDEN * 4
    assert first.input_bytes == 2 * 7 * HIDDEN * 4
    assert first.inputs_need_grad
    assert not _spans(graph, "embed")[0].inputs_need_grad


def test_ops_after_the_forward_belong_to_the_loss() -> None:
    graph = capture(Stack(), ((floats(4, HIDDEN),), {}), loss=lambda out: out.square().mean())
    end = _spans(graph, "")[0].forward[1]
    assert [op.module for op in graph.root.forward[end:]] == [LOSS, LOSS]
    assert all(op.module != LOSS for op in graph.root.forward[:end])
    assert graph.root.backward[0].module == LOSS


class Hidden:
    """A result that FSDP2 cannot look into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@dataclass
class Result:
    """A result that it can."""

    value: torch.Tensor
    cache: Any = None


class Wraps(nn.Module):
    """Returns its output in the container that ``make`` makes."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.lin(x))


class Outer(nn.Module):
    """Uses what is inside."""

    def __init__(self, make: Any, take: Any) -> None:
        super().__init__()
        self.inner = Wraps(make)
        self.take = take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.take(self.inner(x)) * 2


@pytest.mark.parametrize(
    ("make", "take", "kind", "escapes"),
    [
        (lambda t: t, lambda r: r, "tensor", False),
        (lambda t: (t, None), lambda r: r[0], "tuple", False),
        (lambda t: [t], lambda r: r[0], "list", False),
        (lambda t: {"a": (t,)}, lambda r: r["a"][0], "dict", False),
        (lambda t: Result(t), lambda r: r.value, "dataclass", False),
        (lambda t: Result(t, cache=Hidden(t)), lambda r: r.value, "dataclass", False),
        (lambda t: Hidden(t), lambda r: r.value, "opaque:Hidden", True),
        (lambda t: (t.detach(), Hidden(t)), lambda r: r[1].value, "tuple", False),
        (lambda t: (t.detach() + 1, Hidden(t)), lambda r: r[1].value, "opaque:Hidden", True),
    ],
)
def test_outputs_as_fsdp2_sees_them(make: Any, take: Any, kind: str, escapes: bool) -> None:
    graph = capture(Outer(make, take), ((floats(2, 3),), {}))
    span = _spans(graph, "inner")[0]
    assert (span.output_kind, span.escapes) == (kind, escapes)


def test_a_tensor_that_is_stored_and_used_escapes() -> None:
    class Stores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = self.lin(x)
            return x * 2

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stores = Stores()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stores(x) + self.stores.kept

    model = Uses()
    graph = capture(model, ((floats(2, 3),), {}))
    assert _spans(graph, "stores")[0].escapes
    assert _spans(graph, "stores")[0].output_kind == "tensor"
    assert not _spans(graph, "stores.lin")[0].escapes
    assert not hasattr(model.stores, "kept")


def test_views_among_outputs_are_told() -> None:
    graph = capture(nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), ((floats(2, 3, 2),), {}))
    assert [_spans(graph, fqn)[0].output_is_view for fqn in ("0", "1")] == [True, False]


def test_buffers_and_traits() -> None:
    graph = _capture("convolutional", device_kind="cuda")
    assert [buffer.name for buffer in graph.buffers] == [
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip
    assert all(buffer.persistent for buffer in graph.buffers)
    assert graph.buffers[2].dtype == "int64"
    assert _module(graph, "norm").traits == ("batch-statistics",)
    assert _module(graph, "drop").traits == ("dropout",)


def test_parameter_traits() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCAB, 4, sparse=True)
            self.one = nn.Linear(4, 4, bias=False)
            self.two = nn.Parameter(self.one.weight.data)
            self.turned = nn.Parameter(torch.ones(3, 4).t())
            self.counted = nn.Parameter(torch.zeros(4), requires_grad=False)
            self.spectrum = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.counted.add_(1)
            x = self.one(self.table(tokens)) @ self.two * self.counted * self.spectrum.real
            return x @ self.turned

    graph = capture(Odd(), ((ids(2, 3),), {}))
    traits = {param.key: param.traits for param in graph.params}
    assert traits == {
        "table.weight": ("sparse-grad",),
        "one.weight": ("shares-storage",),
        "two": ("shares-storage",),
        "turned": (),
        "counted": ("written-in-forward",),
        "spectrum": ("complex",),
    }
    assert not _param(graph, "turned").contiguous
    assert check(graph) == ()


def test_several_inputs_unite_the_paths() -> None:
    short, long = ((floats(4, 5),), {}), ((floats(4, 5),), {"pixels": floats(4, HIDDEN)})
    graph = capture(OnPath(), [short, long])
    assert check(graph) == ()
    assert _module(graph, "vision").num_calls == 1
    assert _param(graph, "vision.head.weight").gets_grad
    assert _param(graph, "vision.head.weight").readers == (("", "vision", "vision.head"),)
    names = [span.module for span in graph.root.spans]
    assert names.index("text") < names.index("vision") < names.index("vision.layers.0") < names.index("head")
    conditional = {node.fqn for node in graph.modules if "conditional" in node.traits}
    assert {"vision", "vision.layers.0", "vision.head"} <= conditional
    assert not {"", "text", "head"} & conditional
    (note,) = graph.diagnostics
    assert (note.code, note.severity, note.where) == ("AS103", "note", "vision")
    alone = capture(OnPath(), short)
    assert alone.root.forward == graph.root.forward
    assert _module(alone, "vision").num_calls == 0


def test_isomorphic_modules_have_one_digest() -> None:
    class Indexed(Block):
        def __init__(self, layer_idx: int, width: int) -> None:
            super().__init__(HIDDEN, width)
            self.layer_idx = layer_idx
            self.place = f"layers.{layer_idx}.block"

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Indexed(i, 8 if i == 2 else 4) for i in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    graph = capture(Model(), ((floats(2, HIDDEN),), {}))
    digests = [_module(graph, f"layers.{i}").repeat_class for i in range(4)]
    assert digests[0] == digests[1] == digests[3] != digests[2]


def test_a_scalar_attribute_tells_modules_apart() -> None:
    class Scaled(Block):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

    model = nn.Sequential(Scaled(0.5), Scaled(0.5), Scaled(0.25))
    graph = capture(model, ((floats(2, HIDDEN),), {}))
    digests = [_module(graph, str(i)).repeat_class for i in range(3)]
    assert digests[0] == digests[1] != digests[2]


def test_inputs_are_listed_by_name() -> None:
    graph = _capture("language_model")
    assert [(i.name, i.shape, i.dtype) for i in graph.inputs] == [("0", (2, 7), "int64"), ("labels", (2, 7), "int64")]


class Changes(nn.Module):
    """A block that treats its input and its result as ``way`` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 3)
        self.block = Treats(way)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x) * 1.0
        kept: list[torch.Tensor] = []
        y = self.block(h, kept)
        if self.way == "view":
            y += 1
        return y.sum() + sum(kept)


class Treats(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.way = way

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        if self.way == "changes":
            return self.lin(x.relu_())
        if self.way == "changes without gradient":
            with torch.no_grad():
                x.mul_(2)
        if self.way == "changes a copy":
            return self.lin(x.clone().relu_())
        if self.way == "passes on":
            kept.append(self.lin(x).square().mean())
            return x
        if self.way == "returns both":
            kept.append(self.lin(x).square().mean())
            return x * 2
        return self.lin(x)


@pytest.mark.parametrize(
    ("way", "changes", "early"),
    [
        ("plain", False, ()),
        ("changes", True, ()),
        ("changes without gradient", False, ()),
        ("changes a copy", False, ()),
        ("passes on", False, ("block.lin.weight",)),
        ("returns both", False, ()),
        ("view", False, ("block.lin.weight",)),
    ],
)
def test_inputs_that_are_changed_and_hooks_that_come_too_late(way: str, changes: bool, early: tuple[str, ...]) -> None:
    graph = capture(Changes(way), ((floats(2, 4, 3),), {}))
    (span,) = _spans(graph, "block")
    assert (span.changes_input, span.early_params) == (changes, early)
    assert all(not other.early_params for other in _spans(graph, ""))
