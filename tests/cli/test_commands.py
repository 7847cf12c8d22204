"""What each command takes, asks of the pipeline, writes and prints."""

import dataclasses
import inspect
import json
import os
import sys
import time
from pathlib import Path

import msgspec
import pytest

from autoshard.cli.progress import Progress
from autoshard.plan import encode_plan, load_plan, save_plan
from autoshard.report import explain, format_memory, format_plan, format_verdict, list_codes, memory_figures, title
from autoshard.request import Request, resolve
from autoshard.simulate import simulate, timeline_record
from tests.graphs import build, decoder
from tests.plans import deep_plan, full_plan, small_plan, unit
from tests.simulate.measured import decisions


def test_options_become_the_request(cli, pipeline) -> None:
    argv = (
        "plan m.py:f --device cpu --devices 6 --memory 1GiB --precision bf16 --optimizer sgd --recompute full "
        "--mesh 2x3 --reshard never --objective memory --root-percent 25 --method codec:encode --method :generate "
        "--batch 3 --seq 5 --image-size 7 --entry step --frontend tree --verify dry-run --attention sdpa "
        "--no-outline"
    )
    assert cli(*argv.split()).code == 0
    ((args, kwargs),) = pipeline.calls
    request = Request(
        device="cpu",
        devices=6,
        memory="1GiB",
        precision="bf16",
        optimizer="sgd",
        recompute="full",
        mesh="2x3",
        reshard="never",
        objective="memory",
        root_percent=25,
        methods=("codec:encode", ":generate"),
    )
    assert args == ("m.py:f", request)
    assert callable(kwargs.pop("progress"))
    assert callable(kwargs.pop("default_inputs"))
    assert kwargs == {"batch": 3, "seq": 5, "image_size": 7, "entry": "step", "frontend": "tree"} | {
        "verify": "dry-run",
        "attention": "sdpa",
        "outline": False,
    }


def test_what_is_not_given_stays_open(cli, pipeline) -> None:
    assert cli("plan", "m.py").code == 0
    ((args, kwargs),) = pipeline.calls
    assert args == ("m.py", Request())
    assert [kwargs[name] for name in ("batch", "seq", "image_size", "entry")] == [None] * 4
    assert (kwargs["frontend"], kwargs["verify"]) == ("trace", "rules")


def test_each_field_of_the_request_has_an_option(cli) -> None:
    text = cli("plan", "--help").out
    # `none` is the only choice of compile so far.
    for field in {field.name for field in dataclasses.fields(Request)} - {"compile", "methods"}:
        assert f"--{field.replace('_', '-')} " in text


def test_the_pipeline_takes_what_the_command_gives() -> None:
    from autoshard.pipeline import PlanResult, plan_model_file

    options = {"batch": 1, "seq": 1, "image_size": 1, "entry": None, "frontend": "trace", "progress": print}
    options["verify"] = "rules"
    inspect.signature(plan_model_file).bind("m.py", Request(), default_inputs=print, **options)
    assert {"plan", "graph", "analysis", "timeline"} <= {field.name for field in dataclasses.fields(PlanResult)}


def test_without_output_all_is_shown_and_nothing_written(
    cli, pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli("plan", "m.py")
    assert done.code == 0
    assert done.out.startswith(format_plan(small_plan()))
    assert "nothing was written" in done.out.splitlines()[-1]
    assert os.listdir(tmp_path) == []
    assert done.err == ""


def test_with_output_the_plan_is_written_and_told(cli, pipeline, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = cli("plan", "m.py", "-o", path)
    assert path.read_bytes() == encode_plan(small_plan())
    lines = done.out.splitlines()
    assert lines[0] == format_verdict(small_plan())
    assert str(path) in lines[1]
    assert "units, in the order of application (5)" in lines
    assert "considered" not in lines


def test_quiet_is_one_line(cli, pipeline, tmp_path: Path) -> None:
    done = cli("plan", "m.py", "-o", tmp_path / "plan.json", "--quiet")
    assert done.out == format_verdict(small_plan()) + "\n"
    assert (tmp_path / "plan.json").exists()


def test_the_timeline_is_written_beside_the_plan(cli, pipeline, tmp_path: Path) -> None:
    graph, question = build(decoder(num_layers=2)), resolve(Request(device="h100-80gb", devices=8))
    timeline = simulate(graph, decisions(("embed",), ("layers.0",), ("layers.1",), shards=8), question)
    pipeline.result["timeline"] = timeline
    done = cli("plan", "model.py", "--timeline", tmp_path / "t.json", "--quiet")
    assert (done.code, list(tmp_path.iterdir())) == (0, [tmp_path / "t.json"])
    assert json.loads((tmp_path / "t.json").read_text()) == timeline_record(timeline)
    assert (tmp_path / "t.json").read_text().count("\n") == 14 + len(timeline.events) + len(
        list(timeline.collectives())
    )
    refused = cli("plan", "model.py", "--timeline", tmp_path / "no" / "t.json")
    assert (refused.code, refused.out, len(pipeline.calls)) == (2, "", 1)


def test_json_is_the_plan_file_and_nothing_else(cli, pipeline, tmp_path: Path) -> None:
    pipeline.act = lambda: print("the user's model file talks")
    done = cli("plan", "m.py", "--json", "-o", tmp_path / "plan.json")
    assert done.out == encode_plan(small_plan()).decode()
    assert done.err == "the user's model file talks\n"
    assert (tmp_path / "plan.json").read_text() == done.out


def test_a_plan_that_cannot_be_applied_yet_is_told_at_once(cli, pipeline) -> None:
    pipeline.result["plan"] = small_plan(offload="cpu")
    done = cli("plan", "m.py")
    assert done.code == 0
    assert done.err.startswith("autoshard: warning: apply_plan will refuse this plan at $.offload")


@pytest.mark.parametrize("name", ["ir", "analysis", "space", "timeline"])
def test_dumps(name: str, cli, pipeline) -> None:
    from autoshard.analysis import analyze
    from autoshard.simulate import simulate

    graph = build(decoder(2))
    analysis = analyze(graph, num_shards=2)
    plan = small_plan(units=(unit("layers.0"), unit("layers.1"), unit("")))
    timeline = simulate(graph, plan, resolve(Request(device="cpu", devices=2, memory="1GiB")))
    pipeline.result.update(graph=graph, analysis=analysis, timeline=timeline)
    done = cli("plan", "m.py", "--dump", name)
    assert done.code == 0
    assert len(done.out.splitlines()) > 5
    words = {"ir": "layers.0", "analysis": "layers.1", "space": "layers.1", "timeline": "optimizer"}
    assert words[name] in done.out
    assert done.out == cli("plan", "m.py", "--dump", name).out


def test_inspect_shows_what_plan_showed(cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(deep_plan(), path)
    assert cli("inspect", path).out == format_plan(deep_plan()) + "\n"
    assert cli("inspect", path, "--all").out == format_plan(deep_plan(), detail=True) + "\n"
    assert cli("inspect", path, "--json").out == path.read_text()


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_inspect_memory(cli, tmp_path: Path, options: tuple[str, ...]) -> None:
    save_plan(small_plan(), tmp_path / "plan.json")
    done = cli("inspect", tmp_path / "plan.json", "--memory", *options)
    assert (done.code, done.err) == (0, "")
    if options:
        assert json.loads(done.out) == memory_figures(small_plan())
    else:
        assert done.out == format_memory(small_plan()) + "\n"


def test_inspect_brings_a_plan_into_its_one_form(cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(encode_plan(small_plan())), sort_keys=True, indent=7))
    assert cli("inspect", path, "--json").out == encode_plan(small_plan()).decode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("{}", "version"),
        ('{"version": 2}', "version 2 is not supported"),
        (encode_plan(full_plan()).decode(), "cannot be applied by this release yet"),
    ],
)
def test_inspect_refuses_what_is_no_plan(cli, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    done = cli("inspect", path)
    assert (done.code, done.out) == (4, "")
    assert done.err.startswith(f"autoshard: error: {path}: not a valid plan at $")
    assert words in done.err


def test_inspect_of_a_file_that_is_not_there(cli, tmp_path: Path) -> None:
    done = cli("inspect", tmp_path / "plan.json")
    assert (done.code, done.out) == (4, "")
    assert done.err == (
        f"autoshard: error: {tmp_path}/plan.json: no such file\n"
        "  remedy: name a file that `autoshard plan -o` or save_plan wrote\n"
    )


def test_names_in_a_plan_do_not_steer_the_terminal(cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    provenance = msgspec.structs.replace(small_plan().provenance, loss="field\x1b[31m")
    save_plan(small_plan(units=(unit("a\x1b[2J\r\x9b"), *small_plan().units), provenance=provenance), path)
    done = cli("inspect", path)
    assert not {"\x1b", "\r", "\x9b"} & set(done.out)
    assert "a\\x1b[2J\\x0d\\x9b" in done.out
    assert "field\\x1b[31m" in done.out
    assert load_plan(path).units[0].modules == ("a\x1b[2J\r\x9b",)


def test_explain(cli) -> None:
    done = cli("explain", "as203")
    assert (done.code, done.out) == (0, explain("AS203"))
    tree = json.loads(cli("explain", "AS203", "--json").out)
    assert tree == {"code": "AS203", "title": title("AS203"), "text": explain("AS203")}


def test_explain_without_a_code_lists_all(cli) -> None:
    lines = cli("explain").out.splitlines()
    assert [line.split()[0] for line in lines] == list(list_codes())
    assert json.loads(cli("explain", "--json").out) == {code: title(code) for code in list_codes()}


def test_explain_an_unknown_code(cli) -> None:
    done = cli("explain", "AS000")
    assert (done.code, done.out) == (2, "")
    assert "AS203" in done.err


def test_progress_is_silent_in_the_first_second() -> None:
    lines: list[str] = []
    with Progress(lines.append, delay_s=60) as progress:
        progress("loading")
        progress("planning")
    assert lines == []


def test_progress_tells_the_running_stage_once_it_is_late() -> None:
    lines: list[str] = []
    with Progress(lines.append, delay_s=0.02) as progress:
        progress("loading")
        progress("capturing")
        deadline = time.monotonic() + 5
        while not lines and time.monotonic() < deadline:
            time.sleep(0.005)
        progress("planning")
    assert lines == ["capturing", "planning"]


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_goes_to_stderr_unless_quiet(cli, pipeline, monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    monkeypatch.setattr("autoshard.cli.progress.DELAY_S", 0.0)

    def slow() -> None:
        progress = pipeline.calls[-1][1]["progress"]
        for _ in range(1000):
            progress("capturing one training step")
            time.sleep(0.001)
            if progress._is_late:
                break

    pipeline.act = slow
    done = cli("plan", "m.py", "--json", *["--quiet"] * quiet)
    assert ("autoshard: capturing one training step" in done.err) is not quiet
    assert done.out == encode_plan(small_plan()).decode()


def test_output_without_a_binary_buffer(pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from autoshard.cli import main

    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    assert main(["plan", "m.py", "--json"]) == 0
    assert text.getvalue() == encode_plan(small_plan()).decode()
