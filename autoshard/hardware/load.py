"""Load a device profile by name or from the user's own JSON file."""

from importlib import resources
from pathlib import Path

import msgspec

from autoshard.errors import RequestError
from autoshard.hardware.profile import DeviceProfile

MIN_RATE = 1_000
"""No device has fewer bytes, or does fewer operations or moves fewer bytes in a second."""
MIN_COUNT = {"devices_per_node": 1, "between_nodes.cards_per_node": 1}
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
FRACTIONS = ("attention", "compute", "link", "memory")
_REMEDY = "take a profile by name, or a copy of one as a file; docs/how-to/device-profile.md tells every field"


def known_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with autoshard, sorted."""
    folder = resources.files("autoshard.hardware") / "profiles"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def load_profile(name: str) -> DeviceProfile:
    """The profile of that name, or the one in the JSON file at that path (anything that ends in ``.json``).

    Raises:
        RequestError: the name is unknown, or the file cannot be read or is not a profile.

    Examples:
        >>> load_profile("h100-80gb").devices_per_node
        8
    """
    if name.endswith(".json"):
        try:
            text = Path(name).read_bytes()
        except OSError as error:
            raise RequestError("device", name, f"a readable profile file ({error.strerror})", _REMEDY) from None
        return _decode(name, text)
    if name not in known_profiles():
        raise RequestError("device", name, f"one of {', '.join(known_profiles())}, or a profile's .json file", _REMEDY)
    return _decode(name, (resources.files("autoshard.hardware") / "profiles" / f"{name}.json").read_bytes())


def _decode(source: str, text: bytes) -> DeviceProfile:
    try:
        profile = msgspec.json.decode(text, type=DeviceProfile)
    except msgspec.DecodeError as error:
        raise RequestError("device", source, f"a device profile; {error}", _REMEDY) from None
    counts = {
        "memory_bytes": profile.memory_bytes,
        "memory_bytes_per_second": profile.memory_bytes_per_second,
        "devices_per_node": profile.devices_per_node,
        "within_node.bytes_per_second": profile.within_node.bytes_per_second,
        "between_nodes.card_bytes_per_second": profile.between_nodes.card_bytes_per_second,
        "between_nodes.cards_per_node": profile.between_nodes.cards_per_node,
        **{f"flops_per_second.{dtype}": rate for dtype, rate in profile.flops_per_second.items()},
    }
    for where, count in counts.items():
        if count < MIN_COUNT.get(where, MIN_RATE):
            raise _wrong(source, f"{where} is too small: {count}")
    if unknown := sorted(set(profile.achievable) - set(FRACTIONS)):
        raise _wrong(source, f"achievable.{unknown[0]} is none of {', '.join(FRACTIONS)}")
    fractions = {f"achievable.{part}": profile.achievable.get(part, 0) for part in FRACTIONS}
    fractions |= {f"protocols[{i}].bandwidth": way.bandwidth for i, way in enumerate(profile.protocols)}
    for where, fraction in fractions.items():
        if not 0 < fraction <= 1:
            raise _wrong(source, f"{where} must lie in (0, 1]")
    times = {"launch_ns": profile.launch_ns, "unit_host_ns": profile.unit_host_ns}
    for i, way in enumerate(profile.protocols):
        times |= {f"protocols[{i}].{name}": getattr(way, name) for name in ("start_ns", "hop_ns", "network_hop_ns")}
    for where, time in times.items():
        if time < 0:
            raise _wrong(source, f"{where} is less than 0: {time}")
    for collective in COLLECTIVES:
        if not any(collective in way.serves for way in profile.protocols):
            raise _wrong(source, f"none of protocols serves {collective}")
    for i, way in enumerate(profile.protocols):
        if way.algorithm == "tree" and set(way.serves) - {"all-reduce"}:
            raise _wrong(source, f"protocols[{i}] is a tree, which serves all-reduce alone")
    if "float32" not in profile.flops_per_second:
        raise _wrong(source, "flops_per_second.float32 is missing")
    if profile.headroom_bytes >= profile.memory_bytes:
        raise _wrong(source, "the headroom is more than the memory")
    return profile


def _wrong(source: str, what: str) -> RequestError:
    return RequestError("device", source, f"a device profile; {what}", _REMEDY)
