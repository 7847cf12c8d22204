"""The device profiles that come with autoshard, and loading a user's own."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoshard.errors import RequestError
from autoshard.hardware import DeviceProfile, known_profiles, load_profile

NAMES = ("a100-40gb", "a100-80gb", "b200", "cpu", "h100-80gb", "h200", "l40s", "mi300x", "rtx-4090")


def test_known_profiles() -> None:
    assert known_profiles() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_names_its_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    figures = {"memory_bytes", "memory_bytes_per_second", "launch_ns", "unit_host_ns", "devices_per_node"}
    figures |= {f"flops_per_second.{dtype}" for dtype in profile.flops_per_second}
    figures |= {f"achievable.{part}" for part in profile.achievable}
    figures |= {"within_node.bytes_per_second", "protocols", "overlap"}
    figures |= {f"between_nodes.{f}" for f in ("card_bytes_per_second", "cards_per_node")}
    assert set(profile.sources) == figures
    assert all(profile.sources.values())
    assert {part.name for part in profile.headroom} == {"context", "communication library", "fragmentation"}
    assert all(part.source.startswith("estimate") for part in profile.headroom)


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_in_proportion(name: str) -> None:
    profile = load_profile(name)
    assert profile.headroom_bytes < profile.memory_bytes // 8
    assert profile.flops_per_second["float32"] <= profile.flops_per_second["bfloat16"] or profile.kind == "cpu"
    assert profile.between_nodes.card_bytes_per_second <= profile.within_node.bytes_per_second
    assert set(profile.achievable) == {"attention", "compute", "link", "memory"}
    assert (profile.overlap == "none") == (profile.kind == "cpu")
    assert profile.calibration is None
    assert profile.within_node.bytes_per_second < profile.memory_bytes_per_second


FRACTIONS = {"attention": 0.5, "compute": 0.5, "link": 0.5, "memory": 0.5}
ALL = ["all-gather", "reduce-scatter", "all-reduce"]
RING = {
    "name": "one",
    "algorithm": "ring",
    "serves": ALL,
    "start_ns": 1,
    "hop_ns": 1,
    "network_hop_ns": 1,
    "bandwidth": 1.0,
}


def _file(tmp_path: Path, **changes: Any) -> str:
    fields = msgspec.to_builtins(load_profile("cpu")) | changes
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(fields))
    return str(path)


def test_own_file(tmp_path: Path) -> None:
    profile = load_profile(_file(tmp_path, name="mine", memory_bytes=12345678901))
    assert (profile.name, profile.memory_bytes) == ("mine", 12345678901)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"memory_bytes": 0}, "memory_bytes is too small: 0"),
        ({"devices_per_node": -1}, "devices_per_node is too small: -1"),
        ({"flops_per_second": {"bfloat16": 1000}}, "flops_per_second.float32 is missing"),
        ({"flops_per_second": {"float32": 0}}, "flops_per_second.float32 is too small: 0"),
        ({"flops_per_second": {"float32": 1}}, "flops_per_second.float32 is too small: 1"),
        ({"achievable": {**FRACTIONS, "compute": 1.5}}, "achievable.compute must lie in (0, 1]"),
        ({"achievable": {"compute": 0.5, "memory": 0.5, "attention": 0.5}}, "achievable.link must lie in (0, 1]"),
        ({"achievable": {**FRACTIONS, "luck": 0.5}}, "achievable.luck is none of"),
        ({"launch_ns": -1}, "launch_ns is less than 0: -1"),
        ({"protocols": []}, "none of protocols serves all-gather"),
        ({"protocols": [{**RING, "serves": ["all-gather", "all-reduce"]}]}, "none of protocols serves reduce-scatter"),
        ({"protocols": [{**RING, "algorithm": "tree"}]}, "protocols[0] is a tree, which serves all-reduce alone"),
        ({"protocols": [{**RING, "algorithm": "star"}]}, "$.protocols[0].algorithm"),
        ({"protocols": [RING, {**RING, "hop_ns": -3}]}, "protocols[1].hop_ns is less than 0: -3"),
        ({"protocols": [{**RING, "bandwidth": 0.0}]}, "protocols[0].bandwidth must lie in (0, 1]"),
        ({"between_nodes": {"card_bytes_per_second": 10**9, "cards_per_node": 0}}, "cards_per_node is too small: 0"),
        ({"overlap": "some"}, "$.overlap"),
        ({"memory_bytes": 1000}, "the headroom is more than the memory"),
        ({"memory_byte": 1}, "memory_byte"),
        ({"memory_bytes": "16GiB"}, "$.memory_bytes"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError) as caught:
        load_profile(_file(tmp_path, **changes))
    assert caught.value.field == "device"
    assert told in str(caught.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(RequestError, match="one of a100-40gb, a100-80gb, b200, cpu, "):
        load_profile("v100")


def test_a_missing_file_is_an_error_of_the_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a readable profile file"):
        load_profile(str(tmp_path / "none.json"))


def test_profiles_are_frozen() -> None:
    profile: DeviceProfile = load_profile("cpu")
    with pytest.raises(AttributeError):
        profile.memory_bytes = 1  # type: ignore[misc]
