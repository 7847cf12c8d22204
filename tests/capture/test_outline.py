"""Outlined and full traces of one step are the same graph; a block that does more than its result is traced in full.

The full trace is the oracle: it runs every block.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.ir import ModelGraph, Outline
from autoshard.ir.text import format_graph

pytestmark = pytest.mark.slow

DEPTH, DIM = 7, 6


class Block(nn.Module):
    """A block with a residual; what it does beside is ``extra``."""

    def __init__(self, index: int, extra: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layer_idx = index
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.extra = extra

    def forward(self, x: Any, *more: Any) -> Any:
        y = self.down(torch.relu(self.up(self.norm(x))))
        if self.extra is not None:
            found = self.extra(self, x, y, *more)
            if found is not None:
                return found
        return x + y


class Stack(nn.Module):
    def __init__(self, extra: Callable[..., Any] | None = None, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(3, DIM)
        self.layers = nn.ModuleList(Block(index, extra) for index in range(DEPTH))
        self.head = nn.Linear(DIM, 2)
        self.call = call
        self.aux: list[Any] = []

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if self.call is None else self.call(self, layer, x)
        return self.head(x)


def both(model: nn.Module, inputs: Any = None, **options: Any) -> tuple[ModelGraph, ModelGraph]:
    inputs = ((torch.randn(4, 3),), {}) if inputs is None else inputs
    return capture(model, inputs, outline=False, **options), capture(model, inputs, **options)


def require_outlined(model: nn.Module, num_replayed: int, inputs: Any = None, **options: Any) -> ModelGraph:
    full, outlined = both(model, inputs, **options)
    assert full == outlined
    assert full.outlines == ()
    assert sum(outline.num_replayed for outline in outlined.outlines) == num_replayed
    return outlined


def require_full(model: nn.Module, reason: str, inputs: Any = None) -> Outline:
    full, outlined = both(model, inputs)
    assert full == outlined
    refused = [outline for outline in outlined.outlines if outline.reason]
    assert [outline.num_replayed for outline in outlined.outlines] == [0] * len(refused)
    assert reason in refused[0].reason
    assert f"traced in full: {refused[0].module or '(root)'}" in format_graph(outlined)
    return refused[0]


def test_a_stack_of_blocks_is_traced_once() -> None:
    graph = require_outlined(Stack(), DEPTH)
    assert graph.outlines == (Outline(module="layers.0", num_blocks=DEPTH, num_replayed=DEPTH),)
    assert f"outlined: {DEPTH} of {DEPTH} blocks like layers.0 from one recording" in format_graph(graph)


def test_only_few_blocks_run() -> None:
    """The block's Python runs once each for the first, a second and the last block, and never again."""
    ran: list[int] = []

    def note(block: Block, x: torch.Tensor, y: torch.Tensor) -> None:
        ran.append(id(block))

    model = Stack(note)
    capture(model, ((torch.randn(4, 3),), {}))
    assert ran == [id(model.layers[index]) for index in (0, 1, DEPTH - 1)]


def test_numbers_that_decide_are_told_apart() -> None:
    model = Stack()
    for index, layer in enumerate(model.layers):
        layer.scale = float(index // 6)  # type: ignore[assignment]
    graph = require_outlined(model, 6)
    assert [outline.module for outline in graph.outlines] == ["layers.0"]


@dataclass
class Config:
    act: Callable[..., Any]


def test_objects_count_by_what_is_in_them() -> None:
    """Six blocks with equal configurations of their own, and one whose configuration says something else."""
    model = Stack(lambda block, x, y: x + block.config.act(y))
    for layer in model.layers:
        layer.config = Config(torch.tanh)  # type: ignore[assignment]
    require_outlined(model, DEPTH)
    model.layers[3].config = Config(torch.sigmoid)  # type: ignore[assignment]
    graph = require_outlined(model, DEPTH)
    assert {outline.module: outline.num_replayed for outline in graph.outlines} == {"layers.0": 6, "layers.3": 1}
    assert sum(op.target == "aten.sigmoid.default" for op in graph.root.forward) == 1


def test_the_first_block_gets_no_gradient_for_its_input() -> None:
    model = Stack()
    model.embed.requires_grad_(False)
    require_outlined(model, DEPTH)
    model.layers.requires_grad_(False)
    require_outlined(model, DEPTH)


def test_a_branch_on_the_index_at_run_time() -> None:
    model = Stack(lambda block, x, y: x + torch.tanh(y).exp() if block.layer_idx == 4 else None)
    require_full(model, "its forward reads layer_idx")


def test_a_hidden_branch_is_found_in_the_last_block() -> None:
    """The index is not an attribute here: only the recordings tell."""
    model = Stack()
    last = model.layers[DEPTH - 1]
    shared = {"last": id(last)}
    for layer in model.layers:
        layer.extra = lambda block, x, y: x + torch.tanh(y) if id(block) == shared["last"] else None  # type: ignore[assignment]
    refused = require_full(model, f"layers.{DEPTH - 1} does something else than layers.0")
    assert "forward" in refused.reason


def test_a_hook_inside_sees_values() -> None:
    model = Stack()
    model.layers[2].up.register_forward_hook(lambda module, args, result: model.aux.append(result))
    full, outlined = both(model)
    assert full == outlined
    assert [(o.num_replayed, o.reason) for o in outlined.outlines if o.module == "layers.2"] == []
    for layer in model.layers:
        layer.up.register_forward_hook(lambda module, args, result: model.aux.append(result))
    require_full(model, "a hook hangs on layers.0.up")


def _stash(block: Block, x: torch.Tensor, y: torch.Tensor) -> None:
    block.last = y


def _count(block: Block, x: torch.Tensor, y: torch.Tensor) -> None:
    block.calls = getattr(block, "calls", 0) + 1


def _append_own(block: Block, x: torch.Tensor, y: torch.Tensor) -> None:
    block.__dict__.setdefault("seen", []).append(1)


def _draw(block: Block, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    return x if random.random() < 0.5 else None


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (_stash, "leaves a tensor behind"),
        (_count, "changes its own attributes"),
        (_append_own, "changes its own attributes"),
        (_draw, "draws random numbers"),
    ],
)
def test_blocks_with_a_memory(extra: Callable[..., Any], reason: str) -> None:
    require_full(Stack(extra), reason)


def test_an_auxiliary_loss_in_a_list_elsewhere() -> None:
    losses: list[torch.Tensor] = []

    class WithLosses(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            losses.clear()
            return super().forward(x).mean() + torch.stack(losses).sum()

    require_full(WithLosses(lambda block, x, y: losses.append(y.square().mean())), "leaves a tensor behind")


class Cache:
    """Opaque to everyone."""

    def __init__(self) -> None:
        self.values: list[Any] = []


@pytest.mark.parametrize(("made", "reason"), [(Cache, "takes or gives a Cache"), (list, "changes its arguments")])
def test_a_cache_is_handed_in(made: type, reason: str) -> None:
    def run(model: Stack, layer: nn.Module, x: torch.Tensor) -> Any:
        return layer(x, made())

    def fill(block: Block, x: torch.Tensor, y: torch.Tensor, cache: Any) -> None:
        (cache.values if isinstance(cache, Cache) else cache).append(y)

    require_full(Stack(fill, run), reason)


def test_an_argument_is_written_to() -> None:
    class Counts(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            self.steps = torch.zeros(1)
            return super().forward(x) * self.steps

    model = Counts(lambda block, x, y, steps: x + y * steps.add_(1.0).mean(), lambda m, la, x: la(x, m.steps))
    require_full(model, "writes to its arguments")


def test_an_argument_comes_back() -> None:
    """As it is, and as a view of it."""

    def run(model: Stack, layer: nn.Module, x: torch.Tensor) -> Any:
        made, given = layer(x)
        return made + given

    require_outlined(Stack(lambda block, x, y: (x + y, x), run), DEPTH)
    require_full(Stack(lambda block, x, y: (x + y, x.flip(0).view(-1, DIM)[:], x[:1]), lambda m, la, x: la(x)[0]),
                 "returns a view of an argument")  # fmt: skip


def test_a_result_without_use_gets_no_gradient() -> None:
    require_full(Stack(lambda block, x, y: (x + y, y.exp()), lambda m, la, x: la(x)[0]), "gets no gradient")


def test_a_parameter_is_tied_or_read_outside() -> None:
    tied = Stack()
    for layer in tied.layers[1:]:
        layer.up.weight = tied.layers[0].up.weight
    require_full(tied, "is tied to one outside")
    for when in ("before", "after"):

        def run(model: Stack, layer: nn.Module, x: torch.Tensor, when: str = when) -> Any:
            if when == "before":
                x = x + layer.up.weight.sum()
            x = layer(x)
            return x + layer.up.weight.sum() if when == "after" else x

        assert "read outside" in require_full(Stack(call=run), "its parameter").reason


def test_a_block_runs_twice() -> None:
    require_full(Stack(call=lambda model, layer, x: layer(layer(x))), "is called more than once")


def test_a_tensor_of_the_outside_is_read() -> None:
    class Closes(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            self.mask = torch.ones(4, 1) * x.sum()
            return super().forward(x)

    model = Closes()
    for layer in model.layers:
        layer.extra = lambda block, x, y: x + y * model.mask  # type: ignore[assignment]
    require_full(model, "reads a t")


def test_a_shared_argument_adds_up_in_the_order_of_its_readers() -> None:
    """Each block reads a tensor that trains, once or twice: autograd adds as many parts as there are reads."""

    class Crossed(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            self.memory = None
            memory = x = self.embed(x)
            for layer in self.layers:
                x = layer(x, memory)
            return self.head(x + memory)

    graph = require_outlined(Crossed(lambda b, x, y, memory: x + y * memory + memory.tanh()), DEPTH)
    adds = sum(op.target == "aten.add.Tensor" for op in graph.root.backward)
    # The stream of the later blocks has two parts each; the memory has two from each later block, four from the first
    # (where it is the stream too) and one from the head, less the one that comes first.
    assert adds == (DEPTH - 1) + 2 * (DEPTH - 1) + 4 + 1 - 1


def test_several_results_on_one_storage() -> None:
    def run(model: Stack, layer: nn.Module, x: torch.Tensor) -> Any:
        one, other = layer(x)
        return torch.cat([one, other], -1)

    require_outlined(Stack(lambda block, x, y: tuple((x + y).chunk(2, -1)), run), DEPTH)


def test_containers_of_results() -> None:
    def run(model: Stack, layer: nn.Module, x: torch.Tensor) -> Any:
        found = layer({"x": [x]}) if isinstance(layer, Opens) else layer(x)
        return found["x"][0]

    class Opens(Block):
        def forward(self, x: Any, *more: Any) -> Any:
            return {"x": [super().forward(x["x"][0])], "none": None}

    model = Stack(call=run)
    model.layers = nn.ModuleList(Opens(index) for index in range(DEPTH))
    require_outlined(model, DEPTH)


class Bag:
    """A result that hides tensors."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_an_opaque_result() -> None:
    require_full(Stack(lambda block, x, y: Bag(x + y), lambda m, la, x: la(x).x), "gives a Bag")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks(use_reentrant: bool) -> None:
    def run(model: Stack, layer: nn.Module, x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant)

    full, outlined = both(Stack(call=run))
    assert full == outlined


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_inside_blocks(use_reentrant: bool) -> None:
    def inside(block: Block, x: torch.Tensor, y: torch.Tensor) -> Any:
        return x + torch.utils.checkpoint.checkpoint(block.up, x, use_reentrant=use_reentrant)[:, :DIM] + y

    full, outlined = both(Stack(inside))
    assert full == outlined


def test_data_that_decides() -> None:
    """An unknown number is assumed in each block and told for each."""
    model = Stack(lambda block, x, y: x + y * (2.0 if y.sum().item() > 0 else 1.0))
    graph = require_outlined(model, DEPTH)
    assert [d.where for d in graph.diagnostics if d.code == "AS102"] == [f"layers.{i}" for i in range(DEPTH)]


def test_known_values_decide() -> None:
    """Blocks that get a mask of other values are other calls, and integer buffers are compared by value."""

    def run(model: Stack, layer: nn.Module, x: torch.Tensor) -> Any:
        return layer(x, torch.tensor([int(layer is not model.layers[3])]))

    model = Stack(lambda block, x, y, mask: x + y if mask.all() else x + y.tanh(), run)
    graph = require_outlined(model, DEPTH)
    assert sum(op.target == "aten.tanh.default" for op in graph.root.forward) == 1
    model = Stack(lambda block, x, y: x + y if block.flag.all() else x + y.tanh())
    for index, layer in enumerate(model.layers):
        layer.register_buffer("flag", torch.tensor([index != 5]))
    graph = require_outlined(model, DEPTH)
    assert sum(op.target == "aten.tanh.default" for op in graph.root.forward) == 1


def test_buffers_that_are_written() -> None:
    model = Stack(lambda block, x, y: x + block.batch(y))
    for layer in model.layers:
        layer.batch = nn.BatchNorm1d(DIM)
    require_outlined(model, DEPTH)


def test_dropout_and_frozen_parts() -> None:
    model = Stack(lambda block, x, y: x + block.drop(y))
    for layer in model.layers:
        layer.drop = nn.Dropout(0.1)
        layer.norm.requires_grad_(False)
    graph = require_outlined(model, DEPTH)
    assert all("dropout" in node.traits for node in graph.modules if node.fqn.endswith(".drop"))


def test_no_gradient_at_all() -> None:
    class Tower(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.embed(x)
            with torch.no_grad():
                for layer in self.layers:
                    x = layer(x)
            return self.head(x)

    require_outlined(Tower(), DEPTH)


class Experts(nn.Module):
    """A mixture in which each expert is a module of its own, and routing depends on data."""

    def __init__(self, index: int, num: int = 6) -> None:
        super().__init__()
        self.layer_idx = index
        self.router = nn.Linear(DIM, num)
        self.experts = nn.ModuleList(Block(expert) for expert in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(weights[:, number] > 0.1)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return x + out


def test_blocks_inside_blocks() -> None:
    model = Stack()
    model.layers = nn.ModuleList(Experts(index) for index in range(DEPTH))
    graph = require_outlined(model, DEPTH + 3 * 6)  # the experts of the three blocks that are traced
    assert [outline.module for outline in graph.outlines] == ["layers.0", "layers.0.experts.0"]


def test_skip_connections() -> None:
    """A net whose second half reads the results of the first, last one first."""

    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.embed(x)
            kept = []
            for layer in self.layers[: DEPTH // 2]:
                x = layer(x)
                kept.append(x)
            for layer in self.layers[DEPTH // 2 :]:
                x = layer(x + kept.pop()) if kept else layer(x)
            return self.head(x)

    require_outlined(Net(), DEPTH)


def test_collected_results() -> None:
    class Collects(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.embed(x)
            states = []
            for layer in self.layers:
                x = layer(x)
                states.append(x)
            return self.head(torch.stack(states[-3:]).mean(0)), states

    require_outlined(Collects(), DEPTH, loss=lambda outputs: outputs[0].square().mean())


def test_several_inputs_and_precisions() -> None:
    pairs = [((torch.randn(4, 3),), {}), ((torch.randn(2, 3),), {})]
    require_outlined(Stack(), DEPTH, pairs, compute_dtype="bfloat16", device_kind="cuda")


def test_a_model_that_fails_says_the_same() -> None:
    model = Stack()
    model.layers[4].down = nn.Linear(2 * DIM, DIM + 1)
    messages = []
    for outline in (True, False):
        with pytest.raises(CaptureError) as error:
            capture(model, ((torch.randn(4, 3),), {}), outline=outline)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_the_model_is_left_as_it_was() -> None:
    model = Stack()
    before = [(dict(vars(module)), list(vars(module))) for module in model.modules()]
    params = dict(model.named_parameters())
    capture(model, ((torch.randn(4, 3),), {}))
    after = [(dict(vars(module)), list(vars(module))) for module in model.modules()]
    assert [names for _, names in before] == [names for _, names in after]
    assert all(one[0].keys() == other[0].keys() for one, other in zip(before, after, strict=True))
    assert all(param is params[name] and param.grad is None for name, param in model.named_parameters())


def test_nothing_of_the_trace_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow search for what is left is not begun: all fake tensors are gone when the trace ends."""

    def search(mode: Any) -> tuple[str, ...]:
        raise AssertionError("something of the trace is still alive")

    monkeypatch.setattr("autoshard.capture.step.left_over", search)
    model = Stack()
    model.layers = nn.ModuleList(Experts(index) for index in range(DEPTH))
    require_outlined(model, DEPTH + 3 * 6)
