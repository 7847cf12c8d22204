"""``python -m autoshard`` is ``autoshard``."""

import gc
import sys

from autoshard.cli import main


def run() -> int:
    """One command in a process of its own: what is alive at its end is not searched for garbage once more."""
    code = main()
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(run())
