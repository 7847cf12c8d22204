"""Device and interconnect profiles: JSON data files and their loader. Imports no torch."""

from autoshard.hardware.load import known_profiles, load_profile
from autoshard.hardware.profile import Calibration, DeviceProfile, Fit, Headroom, Link, Network, Protocol

__all__ = [
    "Calibration",
    "DeviceProfile",
    "Fit",
    "Headroom",
    "Link",
    "Network",
    "Protocol",
    "known_profiles",
    "load_profile",
]
