"""``fit``, ``sweep`` and ``compare``: what they refuse, and what their tables and JSON say."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoshard.cli.compare import like_plan
from autoshard.plan import save_plan
from autoshard.request import Request
from tests.plans import small_plan
from tests.studies.subjects import GraphSubject


@pytest.fixture(autouse=True)
def _subject(monkeypatch: pytest.MonkeyPatch) -> None:
    for asking in ("fit", "sweep", "compare"):
        monkeypatch.setattr(f"autoshard.cli.{asking}.load_subject", lambda *args: GraphSubject())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("fit", "model.py", "--find", "batch", "--batch", "4"), "leave out --batch"),
        (("fit", "model.py", "--find", "luck"), "invalid choice"),
        (("sweep", "model.py", "--devices", "8,many"), "8,many is not a list"),
        (("sweep", "model.py", "--devices", "0"), "0 is not 1 or more"),
        (("sweep", "model.py", "--memory", "60GiB,big"), "big is not a positive size"),
        (("sweep", "model.py", "--memory", "600GiB", "--device", "h100-80gb"), "at most"),
        (("compare", "none.json", "model.py"), "none.json"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], told: str, cli: Any) -> None:
    done = cli(*arguments)
    assert done.code in (2, 4)
    assert told in done.err
    assert done.out == ""


def test_fit_tells_values_and_what_lies_beyond(cli: Any) -> None:
    arguments = (
        "fit",
        "model.py",
        "--device",
        "h100-80gb",
        "--devices",
        "4",
        "--memory",
        "200KiB",
        "--max-devices",
        "64",
    )
    done = cli(*arguments)
    lines = done.out.splitlines()
    assert lines[0] == "what just fits, for model.py; times are estimates of the cost model"
    rows = {row["what"]: row for row in json.loads(cli(*arguments, "--json").out)}
    devices = rows["devices"]
    line = next(line for line in lines if line.startswith("fewest devices"))
    assert f"{devices['value']}  h100-80gb × {devices['value']}" in line
    assert f"{devices['beyond']}: no plan" in line
    assert devices["peak_bytes"] <= 200 * 1024 < devices["peak_bytes"] + devices["missing_bytes"] + 200 * 1024
    memory = rows["memory"]
    assert memory["beyond"] == memory["value"] - 1
    assert memory["peak_bytes"] == memory["value"]
    assert "precision=bf16 (default on cuda)" in done.out


def test_sweep_has_a_row_for_each_question(cli: Any) -> None:
    arguments = ("sweep", "model.py", "--device", "h100-80gb", "--devices", "2,8", "--memory", "2KiB,1GiB")
    cells = json.loads(cli(*arguments, "--json").out)
    assert [(cell["devices"], cell["allowed_bytes"], cell["fits"]) for cell in cells] == [
        (2, 2048, False),
        (2, 2**30, True),
        (8, 2048, False),
        (8, 2**30, True),
    ]
    assert cells[0]["missing_bytes"] > 0
    assert cells[1]["step_ns"] > 0
    text = cli(*arguments).out
    assert text.count("no plan: ") == 2
    assert "memory=" not in text


def test_compare_names_what_is_wrong(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(small_plan(), "theirs.json")
    scores = json.loads(cli("compare", "theirs.json", "model.py", "--json").out)
    assert [score["name"] for score in scores] == ["autoshard", "theirs.json"]
    assert scores[1]["verdict"] == "not legal"
    text = cli("compare", "theirs.json", "model.py").out
    assert "theirs.json\n" in text
    assert scores[1]["findings"][0]["code"] in text


def test_what_is_not_given_is_the_first_plans() -> None:
    plan = small_plan()
    same = like_plan(Request(), plan)
    assert (same.device, same.devices) == (plan.provenance.device, plan.num_devices)
    assert same.memory == plan.projection.allowed_bytes
    other = like_plan(Request(device="l40s", devices=2), plan)
    assert (other.device, other.devices, other.memory) == ("l40s", 2, None)
    made = msgspec.structs.replace(plan.provenance, device="elsewhere")
    unknown = like_plan(Request(), msgspec.structs.replace(plan, provenance=made))
    assert (unknown.device, unknown.memory) == (None, None)
