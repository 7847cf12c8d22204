"""Questions whose other answers make a step run otherwise are found, and those that change nothing are left alone."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autoshard.capture import capture
from autoshard.capture.probe import differing
from autoshard.ir import ModelGraph
from tests.models import floats


class Asks(nn.Module):
    """Three like layers, run as ``way`` says."""

    def __init__(self, way: Callable[["Asks", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.way(self, x, tokens)


def run(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def captured(way: Callable[[Any, Tensor, Tensor], Tensor]) -> ModelGraph:
    return capture(Asks(way), ((floats(6, 4), torch.tensor([0, 1, 2, 1, 2, 1])), {}))


def uncertain(graph: ModelGraph) -> dict[str, str]:
    return {node.fqn: trait for node in graph.modules for trait in ("by-chance", "by-value") if trait in node.traits}


def _while_far(m: Asks, x: Tensor, t: Tensor) -> Tensor:
    while x.norm() > 0.1:
        x = m.layers[0](x)
    return run(m.layers[1:], x)


def _experts(m: Asks, x: Tensor, t: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, layer in enumerate(m.layers):
        rows = (x.argmax(-1) == index).nonzero().flatten()
        if rows.numel():
            out = out.index_add(0, rows, layer(x[rows]))
    return out


def _experts_by_token(m: Asks, x: Tensor, t: Tensor) -> Tensor:
    for index in t.unique().tolist():
        x = x + m.layers[index](x) * (t == index)[:, None]
    return x


def _early_end(m: Asks, x: Tensor, t: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x)
        if x.mean().item() > 0:
            break
    return x


_GENERATOR = random.Random(3)
ALL = ("layers.0", "layers.1", "layers.2")
WAYS: dict[str, tuple[Callable[[Asks, Tensor, Tensor], Tensor], tuple[str, ...], str]] = {
    "a coin": (lambda m, x, t: run((la for la in m.layers if torch.rand(()) < 0.9), x), ALL, "by-chance"),
    "a coin in place": (
        lambda m, x, t: run((la for la in m.layers if torch.empty(1).uniform_(-1, 1) < 0.9), x), ALL, "by-chance",
    ),
    "Python's coin": (lambda m, x, t: run((la for la in m.layers if random.random() < 0.9), x), ALL, "by-chance"),
    "a generator's coin": (
        lambda m, x, t: run((la for la in m.layers if _GENERATOR.random() < 0.9), x), ALL, "by-chance",
    ),
    "numpy's coin": (lambda m, x, t: run((la for la in m.layers if np.random.rand() < 0.9), x), ALL, "by-chance"),
    "a die": (lambda m, x, t: m.layers[int(torch.randint(0, 3, (1,)))](x), ALL, "by-chance"),
    "a choice": (lambda m, x, t: random.choice(list(m.layers))(x), ALL, "by-chance"),
    "another order": (lambda m, x, t: run((m.layers[i] for i in torch.randperm(3).tolist()), x), ALL, "by-chance"),
    "a threshold": (lambda m, x, t: m.layers[0](x) if x.mean() > 0 else m.layers[1](x), ALL[:2], "by-value"),
    "a number of passes": (
        lambda m, x, t: run(m.layers[1:], run([m.layers[0]] * int(x.sum().abs().item()), x)), ALL[:1], "by-value",
    ),
    "a loop that waits": (_while_far, ALL[:1], "by-value"),
    "an early end": (_early_end, ALL[1:], "by-value"),
    "experts": (_experts, ALL, "by-value"),
    "experts by token": (_experts_by_token, ALL, "by-value"),
    "a task in the inputs": (lambda m, x, t: m.layers[0](x) if t[0] == 0 else m.layers[1](x), ALL[:2], "by-value"),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_what_other_answers_change(name: str) -> None:
    way, modules, trait = WAYS[name]
    assert uncertain(captured(way)) == dict.fromkeys(modules, trait)


def _logs(m: Asks, x: Tensor, t: Tensor) -> Tensor:
    m.last = x.mean().item()
    return run(m.layers, x)


def _checks(m: Asks, x: Tensor, t: Tensor) -> Tensor:
    if not torch.isfinite(x).all() or x.abs().max().item() > 1e6:
        raise ValueError("too large")
    assert t.max() < 5
    return run(m.layers, x)


def _per_sample(m: Asks, x: Tensor, t: Tensor) -> Tensor:
    for layer in m.layers:
        x = x + (torch.rand(x.shape[0], 1) < 0.5) * layer(x)
    return x


HARMLESS: dict[str, Callable[[Asks, Tensor, Tensor], Tensor]] = {
    "a value that is kept": _logs,
    "checks": _checks,
    "a number that scales": lambda m, x, t: run(m.layers, x / max(1.0, x.norm().item())),
    "rows that are dropped": _per_sample,
    "dropout": lambda m, x, t: nn.functional.dropout(run(m.layers, x), 0.3),
    "lengths": lambda m, x, t: torch.cat([run(m.layers, x)[:, :n] for n in t.tolist()], dim=1),
    "a step counter": lambda m, x, t: m.layers[int(m.steps) % 3](x),
    "a mask that is whole": lambda m, x, t: run(m.layers, x if (t >= 0).all() else x * (t >= 0)[:, None]),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_no_answer_changes(name: str) -> None:
    graph = captured(HARMLESS[name])
    assert uncertain(graph) == {}
    assert [param.key for param in graph.params if "conditional" in param.traits] == []


def test_a_parameter_that_only_some_data_reads() -> None:
    graph = captured(lambda m, x, t: run(m.layers, x) * (m.scale if x.sum() > 0 else 1))
    assert uncertain(graph) == {}
    assert [param.key for param in graph.params if "conditional" in param.traits] == ["scale"]


@pytest.mark.parametrize("name", ["a coin", "Python's coin", "experts"])
def test_the_answer_is_the_same_every_time(name: str) -> None:
    way = WAYS[name][0]
    first = captured(way)
    random.seed(7)
    torch.manual_seed(7)
    assert uncertain(captured(way)) == uncertain(first)


def test_nothing_random_is_left_behind() -> None:
    model, inputs = Asks(WAYS["Python's coin"][0]), ((floats(6, 4), torch.tensor([0, 1])), {})
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2:]
    assert uncertain(capture(model, inputs))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[2:]) == states[1:]
    assert random.Random.random.__qualname__ == "Random.random"


def test_numbers_of_python_that_change_only_values_are_a_note() -> None:
    graph = captured(lambda m, x, t: run(m.layers, x * random.random()))
    assert uncertain(graph) == {}
    assert [(each.code, each.severity) for each in graph.diagnostics] == [("AS106", "note")]


@given(st.lists(st.sampled_from("abcd")), st.lists(st.sampled_from("abcd")))
def test_without_what_differs_two_sequences_are_one(first: list[str], second: list[str]) -> None:
    found = differing(first, second)
    assert [name for name in first if name not in found] == [name for name in second if name not in found]
    assert found == differing(second, first)
    assert not differing(first, first)
