"""Whether this machine may have an accelerator, without asking torch, which takes seconds to import."""

import sys
from pathlib import Path

_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")


def may_have_accelerator() -> bool:
    """``False`` only where a driver would have left a device file and there is none."""
    return sys.platform != "linux" or any(Path(device).exists() for device in _DEVICES)
