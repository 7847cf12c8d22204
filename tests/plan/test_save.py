"""What the bytes look like, and that a file is written as a whole or not at all."""

import json
import os
from pathlib import Path

import pytest

from autoshard.errors import PlanFormatError, RequestError
from autoshard.plan import decode_plan, encode_plan, load_plan, save_plan
from autoshard.plan.schema import decisions_of
from autoshard.report import format_plan
from tests.plans import deep_plan, full_plan, small_plan, unit

PLANS = {"small": small_plan, "full": full_plan, "deep": deep_plan}


@pytest.mark.parametrize("name", PLANS)
def test_round_trip_of_plans_and_of_bytes(name: str) -> None:
    plan = PLANS[name]()
    data = encode_plan(plan)
    assert decode_plan(data) == plan
    assert encode_plan(decode_plan(data)) == data


@pytest.mark.parametrize("value", [None, 42, "plan.json", decisions_of(small_plan())])
def test_what_is_no_plan_is_told_as_such(tmp_path: Path, value: object) -> None:
    for write in (encode_plan, lambda plan: save_plan(plan, tmp_path / "plan.json"), format_plan):
        with pytest.raises(RequestError, match="expected a Plan\n  remedy: "):
            write(value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [5, None, b"plan.json"])
def test_what_is_no_path_is_told_as_such(path: object) -> None:
    with pytest.raises(RequestError, match="the path of a file"):
        save_plan(small_plan(), path)


def test_bytes_do_not_depend_on_the_order_of_mappings() -> None:
    one, other = {"a.weight": 1, "b.weight": 2}, {"b.weight": 2, "a.weight": 1}
    root = small_plan().units[-1]
    assert encode_plan(small_plan(units=(unit("a", shard_dims=one), root))) == encode_plan(
        small_plan(units=(unit("a", shard_dims=other), root))
    )


def test_each_decision_stands_on_one_line(golden) -> None:
    data = encode_plan(full_plan())
    lines = data.decode().splitlines()
    for item in full_plan().units:
        assert sum(item.digest in line for line in lines) == 1
    for name in ("root only", "by class names", "by size"):
        assert sum(f'"{name}"' in line for line in lines) == 1
    assert data.endswith(b"}\n")
    golden("plan/full.json", data.decode())


def test_version_and_fingerprint_come_first_and_people_last() -> None:
    names = list(json.loads(encode_plan(small_plan())))
    assert names[:4] == ["version", "fingerprint", "entry", "mesh"]
    assert names[-6:] == ["soundness", "optimal", "projection", "alternatives", "diagnostics", "provenance"]


def test_saves_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    save_plan(small_plan(), path)
    assert load_plan(path) == small_plan()
    assert path.read_bytes() == encode_plan(small_plan())
    assert os.listdir(tmp_path) == ["plan.json"]


def test_others_may_read_the_file(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        save_plan(small_plan(), tmp_path / "plan.json")
    finally:
        os.umask(mask)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o644


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "plan.json"
    link.symlink_to(tmp_path / "real" / "plan.json")
    save_plan(small_plan(), link)
    assert link.is_symlink()
    assert load_plan(tmp_path / "real" / "plan.json") == small_plan()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing/plan.json", "does not"),
        ("", "is a folder"),
        ("file/plan.json", "does not"),
        ("pipe", "a regular file"),
        ("nul\0l", "null byte"),
        ("n" * 300, "name too long"),
    ],
)
def test_where_it_cannot_be_written(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError) as caught:
        save_plan(small_plan(), f"{tmp_path}/{path}")
    assert caught.value.field == "output"
    assert words.lower() in str(caught.value).lower()
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("failing", ["fsync", "replace", "open"])
def test_a_failure_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(f"autoshard.plan.save.os.{failing}", fail)
    with pytest.raises(RequestError, match="Permission denied"):
        save_plan(small_plan(), path)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoshard.plan.save.os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_plan(small_plan(), tmp_path / "plan.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"units": ()}, "$.units"),
        ({"soundness": "sure"}, "$.soundness"),
        ({"recompute": ("a..b",)}, "$.recompute[0]"),
        ({"recompute": ("\udc80",)}, "$"),
    ],
)
def test_what_no_loader_would_read_is_not_written(tmp_path: Path, fields: dict[str, object], where: str) -> None:
    with pytest.raises(PlanFormatError) as caught:
        save_plan(small_plan(**fields), tmp_path / "plan.json")
    assert caught.value.where == where
    assert os.listdir(tmp_path) == []
