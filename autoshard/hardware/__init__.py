"""Device and interconnect profiles: JSON data files and their loader. Imports no torch."""

from autoshard.hardware.calibrated import Machine, calibrated_profile, encode_profile
from autoshard.hardware.fit import Sample
from autoshard.hardware.load import known_profiles, load_profile
from autoshard.hardware.profile import Calibration, DeviceProfile, Fit, Headroom, Link, Network, Protocol

__all__ = [
    "Calibration",
    "DeviceProfile",
    "Fit",
    "Headroom",
    "Link",
    "Machine",
    "Network",
    "Protocol",
    "Sample",
    "calibrated_profile",
    "encode_profile",
    "known_profiles",
    "load_profile",
]
