"""Device and interconnect profiles: JSON data files and their loader. Imports no torch."""

from autoshard.hardware.load import known_profiles, load_profile
from autoshard.hardware.profile import DeviceProfile, Headroom, Link

__all__ = ["DeviceProfile", "Headroom", "Link", "known_profiles", "load_profile"]
