"""From what the user asks to a question in which nothing is open."""

import dataclasses
from typing import Any

import pytest

from autoshard.errors import RequestError
from autoshard.hardware import load_profile
from autoshard.request import DTYPE_BYTES, OPTIMIZERS, PRECISIONS, Request, resolve


def assumed_fields(request: Request, found: tuple[str, int] | None = None) -> list[str]:
    return [text.partition("=")[0] for text in resolve(request, found).assumed]


def test_an_empty_request_names_all_that_it_assumes() -> None:
    question = resolve(Request())
    profile = load_profile("h100-80gb")
    assert (question.profile.name, question.num_devices, question.num_replicas) == ("h100-80gb", 8, 1)
    assert question.allowed_bytes == profile.memory_bytes - profile.headroom_bytes
    assert (question.param_dtype, question.reduce_dtype) == ("bfloat16", "float32")
    assert (question.optimizer, question.recompute, question.reshard, question.objective) == (
        "adamw",
        "auto",
        "auto",
        "time",
    )
    assert assumed_fields(Request()) == ["device", "devices", "memory", "precision"]
    assert "device=h100-80gb (no accelerator found)" in question.assumed
    assert all(part.name in question.assumed[2] for part in profile.headroom)


def test_what_is_given_is_not_assumed() -> None:
    request = Request(device="cpu", devices=2, memory="256MiB", precision="fp32")
    question = resolve(request)
    assert question.assumed == ()
    assert (question.num_shards, question.allowed_bytes) == (2, 268435456)
    assert (question.param_dtype, question.reduce_dtype, question.compute_dtype) == ("same", "same", "float32")


def test_accelerators_that_were_found_are_taken() -> None:
    question = resolve(Request(), ("a100-80gb", 4))
    assert (question.profile.name, question.num_devices) == ("a100-80gb", 4)
    assert question.assumed[:2] == ("device=a100-80gb (found on this machine)", "devices=4 (found on this machine)")


def test_the_number_found_is_of_the_device_found() -> None:
    assert resolve(Request(device="h100-80gb"), ("a100-80gb", 4)).num_devices == 8


def test_precision_follows_the_device() -> None:
    assert resolve(Request(device="cpu", devices=2)).param_dtype == "same"
    assert resolve(Request(device="a100-80gb", devices=2)).param_dtype == "bfloat16"
    assert resolve(Request(device="a100-80gb", devices=2, precision="fp32")).param_dtype == "same"


@pytest.mark.parametrize(
    ("mesh", "devices", "replicas", "shards"),
    [
        ("auto", 6, 1, 6),
        ("6", 6, 1, 6),
        ("6", None, 1, 6),
        ("2x3", 6, 2, 3),
        ("2x3", None, 2, 3),
        ("1x6", 6, 1, 6),
        ("6x1", 6, 6, 1),
        ("auto", 1, 1, 1),
    ],
)
def test_mesh(mesh: str, devices: int | None, replicas: int, shards: int) -> None:
    question = resolve(Request(mesh=mesh, devices=devices))
    assert (question.num_replicas, question.num_shards) == (replicas, shards)
    assert "devices" not in assumed_fields(Request(mesh=mesh, devices=devices))


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"device": "h900"}, "device", "h100-80gb"),
        ({"devices": 0}, "devices", "1 or more"),
        ({"devices": -3}, "devices", "1 or more"),
        ({"devices": True}, "devices", "1 or more"),
        ({"devices": 2.0}, "devices", "1 or more"),
        ({"memory": "much"}, "memory", "60GiB"),
        ({"memory": 0}, "memory", "positive"),
        ({"memory": "9TiB"}, "memory", "h100-80gb"),
        ({"precision": "int4"}, "precision", "bf16, fp32"),
        ({"optimizer": "lion"}, "optimizer", "adamw-fused, adamw-for-loop, adamw-8bit, sgd, sgd-momentum"),
        ({"optimizer": "adafactor"}, "optimizer", "Adafactor raises on parameters that FSDP2 shards"),
        ({"micro_batches": 0}, "micro_batches", "1 or more"),
        ({"micro_batches": True}, "micro_batches", "1 or more"),
        ({"gradient_sync": "first"}, "gradient_sync", "every, last"),
        ({"zero_grad": True}, "zero_grad", "none, zeros"),
        ({"clip": 1}, "clip", "True or False"),
        ({"recompute": "some"}, "recompute", "auto, none, full"),
        ({"reshard": "2"}, "reshard", "auto, always, never"),
        ({"objective": "fun"}, "objective", "time, memory"),
        ({"compile": "inductor"}, "compile", "none"),
        ({"mesh": "2x3", "devices": 8}, "mesh", "8"),
        ({"mesh": "8", "devices": 4}, "mesh", "4"),
        ({"mesh": "2x2x2", "devices": 8}, "mesh", "REPLICATE"),
        ({"mesh": "0x8"}, "mesh", "REPLICATE"),
        ({"mesh": "x"}, "mesh", "REPLICATE"),
        ({"mesh": ""}, "mesh", "REPLICATE"),
        ({"mesh": "two"}, "mesh", "REPLICATE"),
    ],
)
def test_what_is_not_a_question_names_the_field(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(Request(**fields))
    assert caught.value.field == field
    assert words in caught.value.expected
    assert caught.value.value == fields[field]


def test_the_same_request_gives_the_same_question() -> None:
    assert resolve(Request(devices=4)) == resolve(Request(devices=4))


def test_both_are_frozen_and_by_keyword() -> None:
    for value in (Request(), resolve(Request())):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.optimizer = "sgd"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Request("cpu")  # type: ignore[misc]


def test_names_that_other_parts_rely_on() -> None:
    assert Request().optimizer == OPTIMIZERS[0]
    for param, reduce in PRECISIONS.values():
        assert {param, reduce} - {"same"} <= set(DTYPE_BYTES)
