"""The published JSON Schema is that of the types, admits plans, and refuses what the loader refuses by form."""

import json
from typing import Any

import jsonschema
import pytest

from autoshard.plan import encode_plan, plan_json_schema
from tests.plans import deep_plan, full_plan, small_plan

SCHEMA = plan_json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_published_file_is_current(golden) -> None:
    golden("docs/reference/plan.schema.json", json.dumps(SCHEMA, indent=2, ensure_ascii=False) + "\n")


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("plan", [small_plan(), full_plan(), deep_plan()], ids=["small", "full", "deep"])
def test_plans_are_valid(plan: Any) -> None:
    VALIDATOR.validate(json.loads(encode_plan(plan)))


def _every_object(node: Any) -> list[dict[str, Any]]:
    children = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    return [node] * isinstance(node, dict) + [found for child in children for found in _every_object(child)]


def test_fields_that_the_loader_wants_are_required_and_others_refused() -> None:
    tree = json.loads(encode_plan(full_plan()))
    optional = {"shard_dims", "peak_bytes", "step_ns", "reasons"}
    free = [tree["projection"]["by_kind"], tree["units"][0]["shard_dims"]]
    free += [phase["by_kind"] for phase in tree["projection"]["phases"]]
    for node in _every_object(tree):
        if any(node is mapping for mapping in free):
            continue
        node["extra"] = 1
        assert not VALIDATOR.is_valid(tree)
        del node["extra"]
        for name in set(node) - optional:
            value = node.pop(name)
            assert not VALIDATOR.is_valid(tree), name
            node[name] = value
    assert VALIDATOR.is_valid(tree)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("fingerprint",), "sha256:0"),
        (("mesh", 0, "size"), 0),
        (("mesh", 0, "role"), "tensor"),
        (("mesh",), []),
        (("units",), []),
        (("units", 0, "modules"), []),
        (("units", 0, "digest"), "xyz"),
        (("units", 0, "num_bytes"), -1),
        (("precision", "param"), "int8"),
        (("soundness",), "yes"),
        (("optimal", "status"), "yes"),
        (("alternatives", 0, "verdict"), "yes"),
        (("diagnostics", 0, "code"), "X1"),
        (("diagnostics", 0, "severity"), "fatal"),
        (("provenance", "frontend"), "guess"),
    ],
)
def test_forms_are_checked(path: tuple[Any, ...], value: Any) -> None:
    tree = json.loads(encode_plan(full_plan()))
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert not VALIDATOR.is_valid(tree)


def test_every_field_is_described() -> None:
    for name, struct in SCHEMA["$defs"].items():
        assert struct["description"], name
        for field, schema in struct["properties"].items():
            assert schema["description"].endswith("."), (name, field)
