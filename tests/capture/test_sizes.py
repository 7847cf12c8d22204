"""Far sizes: what is extrapolated from small captures equals a capture at the size itself, in every number."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture import capture
from autoshard.capture.inputs import Pair
from autoshard.capture.sizes import FAR_TOKENS, SizedInputs, capture_far, is_far
from autoshard.errors import CaptureError, RequestError
from autoshard.ir import ModelGraph
from autoshard.ir.check import check
from autoshard.ir.scaling import first_difference
from tests.models import HIDDEN, MODELS, VOCAB

Sizes = tuple[int, int]
FAR = ((2, 1400), (1, 2303), (3, 5000))

pytestmark = pytest.mark.slow


def _ids(batch: int | None, seq: int | None) -> torch.Tensor:
    return torch.zeros(batch or 2, seq or 7, dtype=torch.long)


def _floats(batch: int | None, seq: int | None) -> torch.Tensor:
    return torch.zeros(batch or 2, seq or 7, HIDDEN)


INPUTS: dict[str, Callable[[int | None, int | None], Pair]] = {
    "language_model": lambda b, s: ((_ids(b, s),), {"labels": _ids(b, s)}),
    "functional_head": lambda b, s: ((_ids(b, s),), {}),
    "attention": lambda b, s: ((_floats(b, s),), {}),
    "stack": lambda b, s: ((_floats(b, s),), {}),
    "checkpointing": lambda b, s: ((_floats(b, s),), {}),
    "mixture": lambda b, s: ((_floats(b, s).flatten(0, 1),), {}),
}


def _far(
    model: nn.Module, make: Callable[[int | None, int | None], Pair], sizes: Sizes, **options: Any
) -> tuple[ModelGraph, list[tuple[int, ...]]]:
    """The graph at far sizes, and the shapes of the inputs that were captured for it."""
    shapes = []

    def captured(pairs: list[Pair]) -> ModelGraph:
        graph = capture(model, pairs, **options)
        shapes.append(graph.inputs[0].shape)
        return graph

    batch, seq = sizes
    return capture_far(SizedInputs(make=lambda b, s: (make(b, s),), batch=batch, seq=seq), captured), shapes


def _require_equal(graph: ModelGraph, direct: ModelGraph) -> None:
    assert check(graph) == ()
    notes = tuple(note for note in graph.diagnostics if note.code != "AS120")
    assert first_difference(replace(graph, diagnostics=notes), direct, numbers=True) == ""
    assert graph.inputs == direct.inputs


@pytest.mark.parametrize(("name", "kind"), [*((name, "cuda") for name in INPUTS), ("attention", "cpu")])
def test_extrapolated_equals_captured(name: str, kind: str) -> None:
    options = {"device_kind": kind, "compute_dtype": "bfloat16" if kind == "cuda" else "float32"}
    model = MODELS[name][0]()
    for sizes in FAR if (name, kind) == ("attention", "cuda") else FAR[:1]:
        graph, shapes = _far(model, INPUTS[name], sizes, **options)
        direct = capture(model, INPUTS[name](*sizes), **options)
        _require_equal(graph, direct)
        assert direct.inputs[0].shape not in shapes
        assert [note.code for note in graph.diagnostics if note.where == "inputs"] == ["AS120"]


def test_a_far_batch_is_extrapolated_along_the_batch() -> None:
    model = MODELS["attention"][0]()
    graph, shapes = _far(model, INPUTS["attention"], (203, 9))
    assert [shape[:2] for shape in shapes] == [(8 + 3, 9), (16 + 3, 9), (24 + 3, 9), (203 - 8, 9)]
    _require_equal(graph, capture(model, INPUTS["attention"](203, 9)))


class _Contrast(nn.Module):
    """Its loss holds a square of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(HIDDEN, 4), nn.Linear(HIDDEN, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = (part(x[:, 0]) for part in (self.left, self.right))
        return (left @ right.t()).softmax(-1)


def test_a_square_of_the_batch() -> None:
    model = _Contrast()
    graph, _ = _far(model, INPUTS["stack"], (1000, 3))
    _require_equal(graph, capture(model, INPUTS["stack"](1000, 3)))


class _Window(nn.Module):
    """Keys beyond a window are cut: linear in the length only from the window on."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.lin, self.window = nn.Linear(HIDDEN, HIDDEN), window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        return (y @ y[:, -self.window :].clone().transpose(1, 2)).softmax(-1).sum()


class _Loop(nn.Module):
    """As many ops as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.lin(x[:, t]) for t in range(x.shape[1] // 200))


class _Short(nn.Module):
    """Runs only from a length on."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] < 1000:
            raise ValueError("too short")
        return self.lin(x)


def test_a_window_is_found_by_the_check_and_a_second_try_starts_above_it() -> None:
    model = _Window(1000)
    graph, shapes = _far(model, INPUTS["stack"], (1, 9000))
    _require_equal(graph, capture(model, INPUTS["stack"](1, 9000)))
    assert len(shapes) == 4 + 4
    assert [shape[1] for shape in shapes[3::4]] == [9000 - 256] * 2
    assert "captures at seq 4392, 4648, 4904" in graph.diagnostics[-1].message


@pytest.mark.parametrize(
    ("model", "seq", "words"),
    [
        (_Window(6000), 9000, "extrapolated and captured"),
        (_Loop(), 2000, "lin differs in num_calls"),
        (_Short(), 2000, "at seq 464 the step does not run (ValueError: too short"),
    ],
)
def test_what_cannot_be_extrapolated_is_captured_and_says_why(model: nn.Module, seq: int, words: str) -> None:
    graph, shapes = _far(model, INPUTS["stack"], (1, seq))
    direct = capture(model, INPUTS["stack"](1, seq))
    assert replace(graph, diagnostics=()) == replace(direct, diagnostics=())
    assert graph.diagnostics[-1].code == "AS121"
    assert words in graph.diagnostics[-1].message
    assert shapes[-1] == direct.inputs[0].shape


def test_where_nothing_runs_the_error_is_that_of_the_asked_size() -> None:
    def make(batch: int | None, seq: int | None) -> Pair:
        return ((torch.zeros(batch or 1, seq or 1, 3),), {})

    with pytest.raises(CaptureError):
        _far(MODELS["stack"][0](), make, (1, 5000))


@pytest.mark.parametrize(
    ("batch", "seq", "expected"),
    [(None, None, False), (1, FAR_TOKENS - 1, False), (2, FAR_TOKENS // 2, True), (FAR_TOKENS, None, True)],
)
def test_what_is_far(batch: int | None, seq: int | None, expected: bool) -> None:
    assert is_far(batch, seq) is expected


def test_a_plan_for_far_sizes_says_so_and_needs_no_inputs_of_that_size() -> None:
    made = []

    def inputs(batch: int | None = None, seq: int | None = None) -> Pair:
        made.append((batch, seq))
        return ((_ids(batch, seq),), {})

    request = autoshard.Request(device="h100-80gb", devices=4)
    model = MODELS["language_model"][0]()
    plan = autoshard.make_plan(model, inputs, request=request, batch=4, seq=1_000_000)
    assert plan.provenance.inputs == ("0: int64[4, 1000000]",)
    assert "AS120" in {found.code for found in plan.diagnostics}
    assert 4 * max(seq for _, seq in made) < FAR_TOKENS
    # The logits are the largest tensor: tokens × vocabulary in bf16.
    assert plan.projection.by_kind["activations"] > 4 * 1_000_000 * VOCAB * 2


def test_a_size_for_fixed_inputs_is_refused() -> None:
    for seq in (5, 1_000_000):
        with pytest.raises(RequestError, match="the inputs are fixed"):
            autoshard.make_plan(MODELS["stack"][0](), ((_floats(2, 3),), {}), seq=seq)


def test_a_decoder_of_transformers_with_a_window() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=8192, sliding_window=1024, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MistralForCausalLM(config)

    def make(batch: int | None, seq: int | None) -> Pair:
        return ((), {"input_ids": _ids(batch, seq), "labels": _ids(batch, seq)})

    options = {"device_kind": "cuda", "compute_dtype": "bfloat16"}
    graph, shapes = _far(model, make, (1, 6001), **options)
    _require_equal(graph, capture(model, make(1, 6001), **options))
    assert len(shapes) == 4 + 4  # the first four do not fill the window
