"""A stand-in for the pipeline: the command line is tested alone, in milliseconds and without torch."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from autoshard.cli import main
from autoshard.plan import Plan
from tests.plans import small_plan


@dataclass
class Pipeline:
    """What the stand-in gives, and what it was asked.

    Attributes:
        result: its fields become those of the result.
        act: runs first; may print or raise.
        calls: arguments of each call.
    """

    result: dict[str, Any] = field(default_factory=lambda: {"plan": small_plan()})
    act: Callable[[], None] = lambda: None
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        return self.result["plan"]

    def plan_model_file(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        self.act()
        return type("PlanResult", (), self.result)()


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    stand_in = Pipeline()
    module = ModuleType("autoshard.pipeline")
    module.plan_model_file = stand_in.plan_model_file  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autoshard.pipeline", module)
    monkeypatch.setattr("autoshard.cli.remembered._question", lambda args, request: None)  # nothing is captured
    return stand_in


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Done]]:
    """``cli("inspect", path)``: exit code and what was printed."""
    monkeypatch.delenv("AUTOSHARD_DEBUG", raising=False)

    def call(*argv: object) -> Done:
        code = main([str(part) for part in argv])
        out, err = capsys.readouterr()
        return Done(code=code, out=out, err=err)

    return call
