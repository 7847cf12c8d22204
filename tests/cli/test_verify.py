"""What ``autoshard verify`` takes, prints and returns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoshard.cli import verify
from autoshard.errors import Diagnostic
from autoshard.plan import load_plan, save_plan
from tests.cli.conftest import Done
from tests.plans import small_plan

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)
    def forward(self, x):
        print("the model talks")
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

class Functional(Model):
    def forward(self, x):
        return super().forward(x * nn.functional.linear(x, self.head.weight).mean())

def build_model():
    return Model()

def functional():
    return Functional()

def example_inputs(batch=None, seq=None):
    return (torch.randn(batch or 3, 16),), {}

def loss(outputs):
    return outputs.square().mean()
"""
ERROR = Diagnostic(code="AS203", severity="error", where="head.weight", message="it is read", remedy="do not")
NOTE = Diagnostic(code="AS406", severity="note", where="embed", message="it stays")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[tuple[Diagnostic, ...]], list[Any]]:
    """Sets what is found; the plan stands in ``plan.json``."""
    monkeypatch.chdir(tmp_path)
    save_plan(small_plan(), "plan.json")

    def set_found(diagnostics: tuple[Diagnostic, ...]) -> list[Any]:
        asked: list[Any] = []

        def verified(args: Any, plan: Any, progress: Any) -> tuple[Diagnostic, ...]:
            asked.append(args)
            return diagnostics

        monkeypatch.setattr(verify, "verify_source", verified)
        return asked

    return set_found


def test_nothing_wrong_is_one_line_and_zero(cli: Callable[..., Done], found: Any) -> None:
    asked = found(())
    done = cli("verify", "plan.json", "m.py", "--batch", 3, "--seq", 5, "--image-size", 7)
    assert (done.code, done.err) == (0, "")
    assert done.out == "plan.json is right for m.py: it passes the rules and a dry run on 2 ranks\n"
    (args,) = asked
    assert [args.level, args.batch, args.seq, args.image_size, args.train] == ["dry-run", 3, 5, 7, None]


def test_rules_alone(cli: Callable[..., Done], found: Any) -> None:
    asked = found(())
    done = cli("verify", "plan.json", "m.py", "--level", "rules")
    assert done.out == "plan.json is right for m.py: it passes the rules\n"
    assert asked[0].level == "rules"


def test_notes_are_counted_and_shown_on_demand(cli: Callable[..., Done], found: Any) -> None:
    found((NOTE,))
    done = cli("verify", "plan.json", "m.py")
    assert done.code == 0
    assert done.out.count("\n") == 1
    assert "(1 to know, --all shows it)" in done.out
    assert "AS406 note: embed: it stays" in cli("verify", "plan.json", "m.py", "--all").out


def test_findings_end_with_eight_and_are_all_told(cli: Callable[..., Done], found: Any) -> None:
    found((ERROR, NOTE))
    done = cli("verify", "plan.json", "m.py")
    assert done.code == 8
    assert done.out.startswith("plan.json is not right for m.py: 1 error\n")
    assert "AS203 error: head.weight: it is read\n    remedy: do not" in done.out
    done = cli("verify", "plan.json", "m.py", "--json")
    assert done.code == 8
    assert msgspec.json.decode(done.out, type=tuple[Diagnostic, ...]) == (ERROR, NOTE)


def test_training_comes_last_and_only_where_it_can_work(
    cli: Callable[..., Done], found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []

    def train(load: Any, plan: Any, num_steps: int) -> tuple[Diagnostic, ...]:
        trained.append(num_steps)
        return (ERROR,)

    monkeypatch.setattr("autoshard.runtime.trial.train_beside_reference", train)
    monkeypatch.setattr(verify, "num_param_bytes", lambda args: 10)
    found((NOTE,))
    assert cli("verify", "plan.json", "m.py", "--train", 3).code == 8
    assert trained == [3]
    found((ERROR,))
    assert cli("verify", "plan.json", "m.py", "--train", 3).code == 8
    assert trained == [3]


def test_a_large_model_is_not_trained(cli: Callable[..., Done], found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found(())
    monkeypatch.setattr(verify, "num_param_bytes", lambda args: 10**9)
    done = cli("verify", "plan.json", "m.py", "--train", 1)
    assert done.code == 2
    assert "at most 191 MiB" in done.err
    assert "954 MiB" in done.err


@pytest.mark.slow
def test_a_model_file_from_plan_to_trial(cli: Callable[..., Done], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autoshard.cli.progress.DELAY_S", 600)
    Path("m.py").write_text(MODEL)
    options = ("--device", "cpu", "--devices", 16, "--memory", "1GiB", "--root-percent", 0)
    done = cli("plan", "m.py", "-o", "plan.json", *options, "--verify", "dry-run")
    assert done.code == 0, done.err
    plan = load_plan("plan.json")
    assert plan.soundness == "dry-run"
    assert ("head",) in [unit.modules for unit in plan.units]
    assert "soundness: dry-run" in cli("inspect", "plan.json").out.splitlines()[0]
    done = cli("verify", "plan.json", "m.py", "--train", 2)
    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[-1].endswith("a dry run on 16 ranks and 2 real steps on 2 ranks")
    done = cli("verify", "plan.json", "m.py:functional", "--json")
    assert done.code == 8
    assert {each["code"] for each in json.loads(done.out)} == {"AS203", "AS402"}


def test_the_tree_alone_cannot_be_run(cli: Callable[..., Done], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODEL)
    done = cli("plan", "m.py", "--frontend", "tree", "--verify", "dry-run", "--device", "cpu", "--devices", 2)
    assert (done.code, done.out) == (2, "")
    assert "no step to run" in done.err
