"""Capture: torch in, ir out. The one stage that runs the user's code."""

from autoshard.capture.graph import capture

__all__ = ["capture"]
