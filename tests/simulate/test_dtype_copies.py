"""A model that asks a parameter for its dtype gets FSDP2's answer: copies by the plan's units, against real steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import capture
from autoshard.ir import DtypeRead, ModelGraph
from autoshard.plan import Decisions
from autoshard.request import Request, resolve
from autoshard.simulate import peak_parts, simulate
from tests.simulate.measured import decisions, measure
from tests.simulate.models import Mlp, mean_square

ROWS, WIDTH, HIDDEN = 1009, 61, 64
BF16 = {"param": "bfloat16", "reduce": "float32"}
LAYERS = (("body.layers.0",), ("body.layers.1",))


class Stem(nn.Module):
    """A projection inside a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


def _kept(body: "Body", x: torch.Tensor) -> torch.Tensor:
    wanted = body.embed.proj.weight.dtype
    if x.dtype != wanted:
        x = x.to(wanted)
    return x


def _compared(body: "Body", x: torch.Tensor) -> torch.Tensor:
    return x.to(body.embed.proj.weight.dtype) if x.dtype != body.embed.proj.weight.dtype else x


def _cast(body: "Body", x: torch.Tensor) -> torch.Tensor:
    wanted = body.embed.proj.weight.dtype
    return (x + 0).to(wanted)


def _is_not_asked(body: "Body", x: torch.Tensor) -> torch.Tensor:
    return x


class Body(nn.Module):
    """Brings its input to the dtype of a parameter two modules below."""

    def __init__(self, bring: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.layers, self.bring = Stem(), nn.ModuleList((Mlp(97), Mlp(53))), bring

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bring(self, x)
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Whole(nn.Module):
    """Hands its input, or what it makes of it, to the body."""

    def __init__(self, bring: Callable[..., torch.Tensor] = _kept, makes: bool = False) -> None:
        super().__init__()
        self.body, self.makes = Body(bring), makes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * 2) if self.makes else self.body(x)


class Late(nn.Module):
    """Asks when the module that holds the parameter has run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stem(), Stem()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, twice = self.first(x), x * 2
        if twice.dtype != self.first.proj.weight.dtype:
            twice = twice.to(self.first.proj.weight.dtype)
        return hidden + self.second(twice)


def _graph(build: Callable[[], nn.Module], dtype: str = "bfloat16") -> ModelGraph:
    return capture(build(), ((torch.ones(ROWS, WIDTH),), {}), loss=mean_square, compute_dtype=dtype, device_kind="cpu")


CASES: dict[str, tuple[Callable[[], nn.Module], Decisions, int]] = {
    "in a unit": (Whole, decisions(("body.embed",), *LAYERS, **BF16), 6),
    "in a deeper unit": (Whole, decisions(("body.embed.proj",), *LAYERS, **BF16), 6),
    "in the root": (Whole, decisions(*LAYERS, **BF16), 0),
    "in the unit that asks": (Whole, decisions(*LAYERS, ("body",), **BF16), 0),
    "in a kept unit": (Whole, decisions((("body.embed",), False), *LAYERS, **BF16), 6),
    "in a list": (Whole, decisions(("body.embed", "body.layers.0"), ("body.layers.1",), **BF16), 6),
    "dtypes side by side": (lambda: Whole(_compared), decisions(("body.embed",), *LAYERS, **BF16), 6),
    "computed": (lambda: Whole(_kept, True), decisions(("body.embed",), *LAYERS, **BF16), 6),
    "cast in between": (lambda: Whole(_cast), decisions(("body.embed",), *LAYERS, **BF16), 4),
    "not asked": (lambda: Whole(_is_not_asked), decisions(("body.embed",), *LAYERS, **BF16), 0),
    "asked late": (Late, decisions(("first",), ("second",), **BF16), 4),
    "asked late, kept": (Late, decisions((("first",), False), ("second",), **BF16), 0),
    "asked late, in the root": (Late, decisions(("second",), **BF16), 0),
}
"""Model, plan, and bytes that each element of the input takes in copies."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_measured(name: str) -> None:
    build, plan, copied = CASES[name]
    torch.manual_seed(0)
    question = resolve(Request(device="cpu", devices=plan.num_devices, optimizer="sgd", precision="fp32"))
    timeline = simulate(_graph(build), plan, question)
    assert sum(copy.num_bytes for copy in timeline.setup.profile.copies) == copied * ROWS * WIDTH
    real = measure(build, plan, (torch.ones(ROWS, WIDTH),), mean_square, "sgd")
    found = (real.forward_peak, real.after_forward, real.backward_peak, real.after_backward)
    projected = (
        timeline.phase_peak_bytes("forward"),
        timeline.phase_end_bytes("forward"),
        timeline.phase_peak_bytes("backward"),
        timeline.phase_end_bytes("backward"),
    )
    assert projected == pytest.approx(found, rel=0.001), (projected, found)


def _reads(build: Callable[[], nn.Module], dtype: str = "bfloat16") -> tuple[Any, ...]:
    return _graph(build, dtype).root.dtype_reads


def test_what_is_noted() -> None:
    numel = ROWS * WIDTH
    (read,) = _reads(Whole)
    assert (read.param, read.module, read.position) == ("body.embed.proj.weight", "body", 0)
    assert (read.stored_bytes, read.cast_bytes) == (4 * numel, 2 * numel)
    assert _reads(Whole, "float32") == ()  # parameters have their stored dtype
    assert _reads(lambda: Whole(_is_not_asked)) == ()


def test_a_tensor_that_was_asked_for_does_not_live_longer() -> None:
    graph, plain = _graph(lambda: Whole(_kept, True)), _graph(lambda: Whole(_is_not_asked, True))
    assert graph.root.storages == plain.root.storages


def test_parts_of_the_peak_name_who_copies() -> None:
    graph, plan = _graph(Whole), decisions(("body.embed",), *LAYERS, **BF16)
    wide = DtypeRead(
        param="body.embed.proj.weight", module="body", position=0, stored_bytes=7_000_003, stored_stop=2,
        cast_bytes=0, cast_stop=0,
    )  # fmt: skip
    graph = replace(graph, regions=(replace(graph.root, dtype_reads=(wide,)),))
    timeline = simulate(graph, plan, resolve(Request(device="cpu", devices=8, optimizer="sgd", precision="fp32")))
    parts = peak_parts(timeline, graph)
    assert sum(part.num_bytes for part in parts) == timeline.peak_bytes
    body = sum(part.num_bytes for part in parts if (part.kind, part.where) == ("activations", "body"))
    assert body == 7_000_003
