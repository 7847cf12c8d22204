"""The page of the command line names what there is, and its commands run."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from autoshard.cli.exits import EXIT_CODES
from autoshard.cli.parser import make_parser
from autoshard.plan import save_plan
from tests.cli.test_measure import measured
from tests.plans import small_plan
from tests.studies.subjects import GraphSubject

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
COMMANDS = re.findall(r"^\$ (autoshard .*)$", PAGE, re.MULTILINE)


def _parsers() -> dict[str, argparse.ArgumentParser]:
    for action in make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError("no commands")


@pytest.mark.parametrize("command", _parsers())
def test_each_option_and_its_choices_stand_on_the_page(command: str) -> None:
    rows = [line for line in SECTIONS[command].splitlines() if line.startswith("| `")]
    documented = {option for row in rows for option in re.findall(r"`(--?[a-z][a-z-]*)", row.split(" | ")[0])}
    actions = [action for action in _parsers()[command]._actions if action.option_strings]
    there = {option for action in actions for option in action.option_strings} - {"-h", "--help"}
    assert documented == there
    for action in actions:
        if action.choices:
            choices = "\\|".join(action.choices)
            assert f"`{action.option_strings[0]} {choices}`" in SECTIONS[command]


def test_the_commands_are_those_of_the_page() -> None:
    assert [*_parsers(), "Exit codes"] == list(SECTIONS)


def test_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", SECTIONS["Exit codes"], re.MULTILINE)
    assert [(int(code), meaning) for code, meaning in rows] == list(EXIT_CODES)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_run(command: str, cli, pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(small_plan(), "plan.json")
    monkeypatch.setattr("autoshard.cli.measure.measure_source", measured)
    monkeypatch.setattr("autoshard.cli.verify.verify_source", lambda *args: ())
    for asking in ("fit", "sweep", "compare"):
        monkeypatch.setattr(f"autoshard.cli.{asking}.load_subject", lambda *args: GraphSubject())
    monkeypatch.setattr("autoshard.cli.verify.num_param_bytes", lambda args: 0)
    monkeypatch.setattr("autoshard.runtime.trial.train_beside_reference", lambda *args: ())
    done = cli(*shlex.split(command)[1:])
    assert (done.code, done.err) == (0, "")
    assert done.out


def test_the_page_shows_commands_of_each_kind() -> None:
    under_torchrun = re.findall(r"^\$ torchrun --nproc-per-node \d+ -m autoshard (.*)$", PAGE, re.MULTILINE)
    parsed = {command.split()[0] for command in under_torchrun if make_parser().parse_args(shlex.split(command))}
    assert {command.split()[1] for command in COMMANDS} | parsed == set(_parsers())


def test_the_glossary_is_in_order_and_says_each_word_once() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| (?!word|---)([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    assert words == sorted(words, key=str.lower)
    assert len(words) == len(set(words)) > 30
