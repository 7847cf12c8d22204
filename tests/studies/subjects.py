"""Subjects without a model: a built graph in place of a captured one, or a rule that says what fits."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn

from autoshard.errors import InfeasibleBudgetError
from autoshard.ir import ModelGraph
from autoshard.request import Question, Request
from autoshard.studies import Subject
from tests.graphs import build, decoder


class GraphSubject(Subject):
    """Every question is about one built graph, whatever the sizes of the inputs."""

    def __init__(self, graph: ModelGraph | None = None) -> None:
        super().__init__(nn.Identity(), lambda batch, seq: None)
        self._graph = graph or build(decoder(num_layers=4, hidden=64))

    def graph(self, question: Question, batch: int | None = None, seq: int | None = None) -> ModelGraph:
        return self._graph


class RuleSubject(Subject):
    """A rule says how many bytes a request needs; ``asked`` remembers all that was asked."""

    def __init__(self, needed: Callable[[int, int, int], int]) -> None:
        super().__init__(nn.Identity(), lambda batch, seq: None)
        self.needed = needed
        self.asked: list[tuple[int, int, int]] = []

    def ask(self, request: Request, batch: int | None = None, seq: int | None = None) -> Any:
        question = self.question(request)
        key = question.num_devices, batch or 1, seq or 1
        self.asked.append(key)
        needed = self.needed(*key)
        if needed > question.allowed_bytes:
            raise InfeasibleBudgetError(question.allowed_bytes, needed, "layer", "forward", ())
        return SimpleNamespace(question=question, found=SimpleNamespace(timeline=SimpleNamespace(peak_bytes=needed)))
