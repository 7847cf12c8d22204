"""A cache of captured steps: a second question about the same model needs no capture. Imports no torch.

A step is found again by what decides it: the model as the user named it with the content of its file, the inputs, the
precision, the kind of device, the environment, and this package; and it is used only if every file that the capture
read is as it was. Whatever is in doubt is a miss.
"""

from autoshard.cache.entry import CachedStep
from autoshard.cache.sources import Recorder, environment, is_unchanged, own_digest
from autoshard.cache.store import clear, folder, key_of, load, save

__all__ = [
    "CachedStep",
    "Recorder",
    "clear",
    "environment",
    "folder",
    "is_unchanged",
    "key_of",
    "load",
    "own_digest",
    "save",
]
