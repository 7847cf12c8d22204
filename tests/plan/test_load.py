"""Every way in which a file is not a plan has an error with the JSON path; nothing else is ever raised."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoshard.errors import PlanFormatError, PlanVersionError, RequestError
from autoshard.plan import Decisions, decode_plan, encode_plan, load_plan, require_supported, save_plan
from autoshard.plan.rules import PRECISION_DTYPES
from autoshard.request import DTYPE_BYTES
from tests.plans import full_plan, small_plan

Tree = dict[str, Any]


def tree() -> Tree:
    return json.loads(encode_plan(full_plan()))


def changed(path: str, value: Any) -> Callable[[Tree], None]:
    """Set ``a.0.b`` to a value; ``...`` removes it."""
    *parents, last = path.split(".")

    def change(node: Any) -> None:
        for name in parents:
            node = node[int(name) if isinstance(node, list) else name]
        key = int(last) if isinstance(node, list) else last
        if value is ...:
            del node[key]
        else:
            node[key] = value

    return change


WRONG = [
    ("version", ..., "$", "version"),
    ("version", "1", "$.version", "int"),
    ("version", True, "$.version", "int"),
    ("version", 1.0, "$.version", "int"),
    ("fingerprint", "sha256:xyz", "$.fingerprint", "64 hex"),
    ("fingerprint", "sha256:" + "A" * 64, "$.fingerprint", "64 hex"),
    ("fingerprint", "sha256:" + "a" * 64 + "\n", "$.fingerprint", "64 hex"),
    ("extra", 1, "$", "extra"),
    ("entry", ..., "$", "entry"),
    ("entry", None, "$.entry", "null"),
    ("entry", "for ward", "$.entry", "method"),
    ("mesh", [], "$.mesh", "one or two"),
    ("mesh.0.role", "shard", "$.mesh[0].role", "replicate"),
    ("mesh.1.role", "replicate", "$.mesh[1].role", "shard"),
    ("mesh.1.name", "replicate", "$.mesh[1].name", "distinct"),
    ("mesh.1.name", "", "$.mesh[1].name", "empty"),
    ("mesh.0.size", 0, "$.mesh[0].size", "from 1"),
    ("mesh.0.size", -2, "$.mesh[0].size", "from 1"),
    ("mesh.0.size", 2**63, "$.mesh[0].size", "too large"),
    ("mesh.0.size", 10**30, "$.mesh[0].size", "too large"),
    ("mesh.0.sizes", 3, "$.mesh[0]", "sizes"),
    ("precision", {}, "$.precision", "param"),
    ("precision.cast_inputs", ..., "$.precision", "cast_inputs"),
    ("precision.cast_inputs", 1, "$.precision.cast_inputs", "bool"),
    ("precision.param", "int64", "$.precision.param", "one of"),
    ("precision.reduce", "bf16", "$.precision.reduce", "one of"),
    ("precision.output", "", "$.precision.output", "one of"),
    ("units", [], "$.units", "empty"),
    ("units", {}, "$.units", "array"),
    ("units", "abc", "$.units", "array"),
    ("units.0.modules", [], "$.units[0].modules", "at least one"),
    ("units.0.modules", "embed", "$.units[0].modules", "array"),
    ("units.0.modules.0", 3, "$.units[0].modules[0]", "str"),
    ("units.0.modules.0", "a..b", "$.units[0].modules[0]", "path"),
    ("units.0.modules.0", ".a", "$.units[0].modules[0]", "path"),
    ("units.0.modules.0", ".".join("a" * 5000), "$.units[0].modules[0]", "path"),
    ("units.2.modules.0", "embed", "$.units[2].modules[0]", "already at $.units[1].modules[0]"),
    ("units.4.modules", ["norm", "norm"], "$.units[4].modules[1]", "already"),
    ("units.1.modules.0", "layers", "$.units[2].modules[0]", "before its ancestor"),
    ("units.0.modules.0", "", "$.units[0].modules", "alone"),
    ("units.5.modules", ["", "tail"], "$.units[5].modules", "alone"),
    ("units.5", ..., "$.units[4].modules", "root"),
    ("units.0.reshard", None, "$.units[0].reshard", "null"),
    ("units.0.reshard", 2, "$.units[0].reshard", "bool"),
    ("units.0.reshard", ..., "$.units[0]", "reshard"),
    ("units.0.num_params", -1, "$.units[0].num_params", "from 0"),
    ("units.0.num_bytes", 1.5, "$.units[0].num_bytes", "int"),
    ("units.0.digest", "0123", "$.units[0].digest", "16 hex"),
    ("units.0.digest", "0123456789ABCDEF", "$.units[0].digest", "16 hex"),
    ("units.0.shard_dims", {"a": 0}, "$.units[0].shard_dims['a']", "from 1"),
    ("units.0.shard_dims", {"a": "1"}, "$.units[0].shard_dims[...]", "int"),
    ("units.0.shard_dims", {"": 1}, "$.units[0].shard_dims['']", "path"),
    ("units.1.shard_dims", {"模块.0.weight": 1}, "$.units[1].shard_dims['模块.0.weight']", "already"),
    ("recompute", ["a", "a"], "$.recompute[1]", "twice"),
    ("recompute", [""], "$.recompute[0]", "path"),
    ("recompute", ..., "$", "recompute"),
    ("methods.0.method", "forward", "$.methods[0].method", "other than forward"),
    ("methods.0.method", "a b", "$.methods[0].method", "other than forward"),
    ("methods.0.module", "a.", "$.methods[0].module", "path"),
    ("methods.1", {"module": "embed", "method": "encode"}, "$.methods[1]", "twice"),
    ("replicated", [1], "$.replicated[0]", "str"),
    ("replicated", ["x", "x"], "$.replicated[1]", "twice"),
    ("rebuilt_buffers", ["x."], "$.rebuilt_buffers[0]", "path"),
    ("reduce_unused", 0, "$.reduce_unused", "bool"),
    ("offload", "", "$.offload", "empty"),
    ("soundness", "proved", "$.soundness", "one of"),
    ("optimal.status", "best", "$.optimal.status", "one of"),
    ("optimal.gap", -0.5, "$.optimal.gap", "negative"),
    ("optimal.gap", "0", "$.optimal.gap", "float"),
    ("optimal.status", "proved", "$.optimal.gap", "proved"),
    ("optimal.status", "heuristic", "$.optimal.gap", "-1"),
    ("optimal.bound_ns", -1, "$.optimal.bound_ns", "from 0"),
    ("projection.peak_bytes", -1, "$.projection.peak_bytes", "from 0"),
    ("projection.by_kind", {"x": -1}, "$.projection.by_kind['x']", "from 0"),
    ("projection.step_ns", ..., "$.projection", "step_ns"),
    ("projection.phases", ..., "$.projection", "phases"),
    ("projection.course", ..., "$.projection", "course"),
    ("projection.phases.0.phase", "middle", "$.projection.phases[0].phase", "forward"),
    ("projection.phases.1.by_kind", {"x": -1}, "$.projection.phases[1].by_kind['x']", "from 0"),
    ("projection.phases.1.end_bytes", -1, "$.projection.phases[1].end_bytes", "from 0"),
    ("projection.parts.0.num_bytes", -1, "$.projection.parts[0].num_bytes", "from 0"),
    ("projection.course.0.end_ns", -1, "$.projection.course[0].end_ns", "from 0"),
    ("projection.course.0.phase", "", "$.projection.course[0].phase", "forward"),
    ("alternatives.0.verdict", "good", "$.alternatives[0].verdict", "one of"),
    ("alternatives.0.peak_bytes", -1, "$.alternatives[0].peak_bytes", "from 0"),
    ("diagnostics.0.code", "AS1", "$.diagnostics[0].code", "three digits"),
    ("diagnostics.0.code", "AS2031", "$.diagnostics[0].code", "three digits"),
    ("diagnostics.0.severity", "fatal", "$.diagnostics[0].severity", "fatal"),
    ("diagnostics.0.where", "", "$.diagnostics[0].where", "empty"),
    ("diagnostics.1.remedy", ..., "$.diagnostics[1]", "remedy"),
    ("provenance.frontend", "guess", "$.provenance.frontend", "one of"),
    ("provenance.host", "x", "$.provenance", "host"),
    ("provenance.loss", "\ud800", "$.provenance.loss", "Unicode"),
]


@pytest.mark.parametrize(("path", "value", "where", "words"), WRONG, ids=[f"{w[0]}={str(w[1])[:20]}" for w in WRONG])
def test_a_wrong_field_is_named(path: str, value: Any, where: str, words: str) -> None:
    wrong = tree()
    changed(path, value)(wrong)
    with pytest.raises(PlanFormatError) as caught:
        decode_plan(json.dumps(wrong).encode(), "plan.json")
    assert caught.value.where == where
    assert words in caught.value.reason
    assert str(caught.value).startswith("plan.json: not a valid plan at ")


def test_the_unchanged_tree_is_a_plan() -> None:
    assert decode_plan(json.dumps(tree()).encode()) == full_plan()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b" \n\t", "empty"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"\xff\xfe{\x00}\x00", "UTF-8"),
        (b"\x80\x04\x95", "UTF-8"),
        (b"\x00" * 100, "not JSON"),
        (b"{", "not JSON"),
        (b"{} {}", "not JSON"),
        (b"{'version': 1}", "not JSON"),
        (b'{"version": 1,}', "not JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'"plan"', "object"),
        (b"7", "object"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b'{"a":' * 1_000_000, "nested too deeply"),
        (b"[" * 900 + b"]" * 900, "object"),
        (b" " * (64 * 2**20 + 1), "larger"),
    ],
)
def test_what_is_no_json_object_is_refused_as_a_whole(data: bytes, words: str) -> None:
    with pytest.raises(PlanFormatError) as caught:
        decode_plan(data)
    assert caught.value.where == "$"
    assert words in caught.value.reason


@pytest.mark.parametrize(
    ("old", "new", "where", "words"),
    [
        ('"size": 3', '"size": NaN', "$.mesh[0].size", "NaN"),
        ('"size": 3', '"size": Infinity', "$.mesh[0].size", "Infinity"),
        ('"gap": 0.000546', '"gap": -Infinity', "$.optimal.gap", "Infinity"),
        ('"gap": 0.000546', '"gap": 1e999', "$.optimal.gap", "too large"),
        ('"size": 3', '"size": ' + "9" * 5000, "$.mesh[0].size", "too large"),
        ('"size": 3', '"size": 3, "size": 3', "$.mesh[0]", "'size' stands twice"),
        ('"version": 1', '"version": 1, "version": 1', "$", "'version' stands twice"),
        ('"模块.0.bias": 2', '"模块.0.bias": 2, "模块.0.bias": 1', "$.units[0].shard_dims", "stands twice"),
        ('"name": "root only"', '"name": "\\udfff"', "$.alternatives[0].name", "Unicode"),
        ('"gradients": 12007,\n', '"\\ud800": 12007,\n', "$.projection.by_kind['\\ud800']", "Unicode"),
    ],
)
def test_what_readers_of_json_disagree_about_is_refused(old: str, new: str, where: str, words: str) -> None:
    text = encode_plan(full_plan()).decode()
    assert text.count(old) == 1
    with pytest.raises(PlanFormatError) as caught:
        decode_plan(text.replace(old, new).encode())
    assert caught.value.where == where
    assert words in caught.value.reason


@pytest.mark.parametrize("version", [0, 2, -1, 99])
def test_another_version_has_its_own_error_whatever_else_is_in_the_file(version: int) -> None:
    with pytest.raises(PlanVersionError) as caught:
        decode_plan(b'{"version": %d, "waves": [NaN, {"a": 1, "a": 2}]}' % version, "new.json")
    assert (caught.value.found, caught.value.supported, caught.value.where) == (version, (1,), "$.version")
    assert str(caught.value) == (
        f"new.json: not a valid plan at $.version: plan version {version} is not supported; this release reads 1"
    )


def test_the_number_of_further_findings_is_told() -> None:
    wrong = tree()
    wrong["soundness"], wrong["mesh"][0]["size"] = "sure", 0
    with pytest.raises(PlanFormatError, match=r"\$\.mesh\[0\]\.size: .*\(and 1 more\)"):
        decode_plan(json.dumps(wrong).encode())


def test_messages_stay_short_whatever_the_file_holds() -> None:
    for path, value in (("units.0.modules.0", "a." * 10**6), ("x" * 10**6, 1), ("soundness", "y" * 10**6)):
        wrong = tree()
        changed(path, value)(wrong) if "." in path else wrong.update({path: value})
        with pytest.raises(PlanFormatError) as caught:
            decode_plan(json.dumps(wrong).encode())
        assert len(str(caught.value)) < 1000


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "ran").touch, ())

    with pytest.raises(PlanFormatError):
        decode_plan(pickle.dumps(Evil()))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing.json", "no such file"), (".", "is a folder"), ("a\0b", "null"), ("pipe", "is a named pipe")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, words: str) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: reading would wait for ever
    with pytest.raises(PlanFormatError) as caught:
        load_plan(f"{tmp_path}/{name}")
    assert caught.value.where == ""
    assert "not a valid plan" not in str(caught.value)
    assert "\n  remedy: " in str(caught.value)
    assert words in caught.value.reason
    assert caught.value.source == f"{tmp_path}/{name}"


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(PlanFormatError, match=r"larger than 64\.0 MiB"):
        load_plan("/dev/zero")


def test_a_pipe_of_the_shell_is_a_file(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, encode_plan(small_plan()))
    os.close(writer)
    assert load_plan(f"/dev/fd/{reader}") == small_plan()
    os.close(reader)


@pytest.mark.parametrize("path", [5, None, b"plan.json"])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(RequestError, match="the path of a plan file"):
        load_plan(path)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"offload": "cpu"}, "$.offload"),
    ],
)
def test_what_cannot_be_applied_yet_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], where: str) -> None:
    path = tmp_path / "plan.json"
    save_plan(small_plan(**fields), path)
    with pytest.raises(PlanFormatError, match="cannot be applied by this release yet") as caught:
        load_plan(path)
    assert (caught.value.where, caught.value.source) == (where, str(path))


def test_what_can_be_applied_is_not_refused(tmp_path: Path) -> None:
    # Every driving field with a value that is not its default, but for those above.
    plan = small_plan(
        **{name: getattr(full_plan(), name) for name in Decisions.__struct_fields__} | {"offload": "none"},
    )
    require_supported(plan)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(str(tmp_path / "plan.json")) == plan


def test_dtypes_of_precision_are_known() -> None:
    assert set(PRECISION_DTYPES) - {"same"} <= set(DTYPE_BYTES)
