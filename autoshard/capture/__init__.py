"""Capture: torch in, ir out. The one stage that runs the user's code."""

from autoshard.capture.build import build_model
from autoshard.capture.device import find_accelerator
from autoshard.capture.fingerprint import fingerprint_items
from autoshard.capture.fx_graph import to_fx_graph
from autoshard.capture.graph import capture
from autoshard.capture.model_file import ModelFile, load_model_file
from autoshard.capture.tree_frontend import capture_tree

__all__ = [
    "ModelFile",
    "build_model",
    "capture",
    "capture_tree",
    "find_accelerator",
    "fingerprint_items",
    "load_model_file",
    "to_fx_graph",
]
