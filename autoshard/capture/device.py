"""The accelerators of this machine, as device profiles call them."""

import re

import torch

from autoshard.hardware import known_profiles

GIB = 2**30
VENDORS = ("nvidia", "geforce", "amd", "instinct")


def find_accelerator() -> tuple[str, int] | None:
    """Name of the profile that describes the CUDA devices, and their number; ``None`` without any.

    For a device that no profile describes, a name of the same form is made up from the device's own, so that looking
    it up fails with a message that says what was found.
    """
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return _profile(properties.name, properties.total_memory), torch.cuda.device_count()


def _profile(name: str, memory_bytes: int) -> str:
    """The known profile of a chip and memory size, or a name for what was found.

    Device names are such as ``NVIDIA H100 80GB HBM3`` or ``NVIDIA GeForce RTX 4090``; the memory that a driver reports
    is a few percent below the size in a profile's name. A name without a size is that of the only size there is.
    """
    words = [word for word in name.lower().split() if word not in VENDORS]
    chips = re.findall(r"[a-z]+\d+[a-z]*", name.lower())
    size = memory_bytes / GIB
    for profile in known_profiles():
        chip, _, gigabytes = profile.partition("-")
        stated = re.fullmatch(r"(\d+)gb", gigabytes)
        if stated is None and words == profile.split("-"):
            return profile
        if stated is not None and chip in chips and abs(size / int(stated[1]) - 1) < 0.15:
            return profile
    return f"{chips[0] if chips else name.lower().replace(' ', '-')}-{round(size)}gb"
