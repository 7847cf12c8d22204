"""Each error class ends with its code and one message; a traceback only where it is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cli.exits import EXIT_CODES
from autoshard.errors import AutoshardError
from autoshard.plan import save_plan
from tests.plans import deep_plan, small_plan
from tests.test_errors import EXAMPLES


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_class_ends_with_its_code_and_its_message(name: str, cli, pipeline, tmp_path: Path) -> None:
    error, exit_code = EXAMPLES[name]
    pipeline.act = lambda: _raise(error)
    done = cli("plan", "model.py", "-o", tmp_path / "plan.json", "--device", "cpu")
    assert done.code == exit_code
    assert done.out == ""
    assert done.err == f"autoshard: error: {error}\n"
    assert os.listdir(tmp_path) == []


def test_a_model_without_a_legal_plan_names_every_reason(cli, pipeline) -> None:
    error, _ = EXAMPLES["NoLegalUnitError"]
    pipeline.act = lambda: _raise(error)
    done = cli("plan", "model.py")
    assert "AS203 error: head: is tied to embed — untie them" in done.err
    assert "AS299 error: (root): holds no parameter" in done.err


def test_an_unexpected_error_is_our_bug(cli, pipeline) -> None:
    pipeline.act = lambda: _raise(KeyError("layers.3"))
    done = cli("plan", "model.py")
    assert done.code == 1
    assert "KeyError: 'layers.3'" in done.err
    assert "bug of autoshard, please report" in done.err
    assert "AUTOSHARD_DEBUG=1" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("error", [KeyError("x"), EXAMPLES["CaptureError"][0]])
def test_a_traceback_on_demand(cli, pipeline, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    pipeline.act = lambda: _raise(error)
    assert "Traceback" not in cli("plan", "model.py").err
    assert "Traceback" in cli("plan", "model.py", "--debug").err
    monkeypatch.setenv("AUTOSHARD_DEBUG", "1")
    assert "Traceback" in cli("plan", "model.py").err
    monkeypatch.setenv("AUTOSHARD_DEBUG", "0")
    assert "Traceback" not in cli("plan", "model.py").err


def test_an_interrupt(cli, pipeline) -> None:
    pipeline.act = lambda: _raise(KeyboardInterrupt())
    done = cli("plan", "model.py")
    assert (done.code, done.err) == (130, "autoshard: interrupted\n")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["plann"],
        ["plan"],
        ["plan", "m.py", "--devices", "two"],
        ["plan", "m.py", "--batch", "0"],
        ["plan", "m.py", "--precision", "int4"],
        ["plan", "m.py", "--json", "--dump", "ir"],
        ["plan", "m.py", "--mem", "1GiB"],
        ["inspect"],
        ["inspect", "a", "b"],
    ],
)
def test_usage(argv: list[str], cli, pipeline) -> None:
    done = cli(*argv)
    assert done.code == 2
    assert done.err.startswith("autoshard: error: ")
    assert "--help" in done.err
    assert done.out == ""
    assert pipeline.calls == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--device", "h900"], "device"),
        (["--memory", "much"], "memory"),
        (["--devices", "0"], "devices"),
        (["--devices", "8", "--mesh", "3x3"], "mesh"),
        (["-o", "/no/such/folder/plan.json"], "output"),
        (["-o", "/"], "output"),
        (["-o", "/dev/null"], "output"),
    ],
)
def test_a_bad_request_is_told_before_any_work(options: list[str], field: str, cli, pipeline) -> None:
    done = cli("plan", "model.py", *options)
    assert done.code == 2
    assert done.err.startswith(f"autoshard: error: {field}: got ")
    assert pipeline.calls == []


def test_help_lists_every_exit_code(cli) -> None:
    done = cli("--help")
    assert done.code == 0
    for code, meaning in EXIT_CODES:
        assert f"  {code:<5}{meaning}\n" in done.out
    raised = {exit_code for _, exit_code in EXAMPLES.values()} | {AutoshardError.exit_code}
    assert raised <= {code for code, _ in EXIT_CODES}


@pytest.mark.parametrize("command", ["plan", "inspect", "explain"])
def test_help_of_a_command_teaches(command: str, cli) -> None:
    done = cli(command, "--help")
    assert done.code == 0
    assert f"autoshard {command} " in done.out.split("examples:")[1]


def test_version(cli) -> None:
    import autoshard

    done = cli("--version")
    assert (done.code, done.out) == (0, f"autoshard {autoshard.__version__}\n")


LOADED = "import sys; print([name for name in ('torch', 'networkx', 'numpy') if name in sys.modules])"


@pytest.mark.parametrize("argv", [["inspect", "PLAN"], ["inspect", "PLAN", "--json"], ["explain", "AS203"], ["--help"]])
def test_reading_loads_neither_torch_nor_networkx(argv: list[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    save_plan(deep_plan(), plan)
    argv = [str(plan) if part == "PLAN" else part for part in argv]
    script = f"from autoshard.cli import main\nassert main({argv!r}) == 0\n{LOADED}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_import_loads_nothing_heavy() -> None:
    script = f"import autoshard\nassert autoshard.__version__\nautoshard.Request, autoshard.RequestError\n{LOADED}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_program_as_a_module(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    save_plan(small_plan(), plan)
    command = [sys.executable, "-m", "autoshard", "inspect", str(plan), "--json"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout == plan.read_bytes()
    plan.write_text(json.dumps({"version": 1}))
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 4
    assert done.stdout == b""
    assert done.stderr.startswith(b"autoshard: error: ")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_stops_early_is_no_error(form: list[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    save_plan(small_plan(), plan)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "autoshard", "inspect", str(plan), *form]
        # Buffered, so that something is left to write when the interpreter ends.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=env)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_text_survives_a_terminal_without_unicode(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    save_plan(small_plan(entry="schritt_é"), plan)
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "autoshard", "inspect", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert "cpu \\xd7 2" in done.stdout
    done = subprocess.run([*command, "--json"], capture_output=True, check=True, env=env)
    assert done.stdout == plan.read_bytes()
