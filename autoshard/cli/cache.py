"""``autoshard cache``: the captured steps that are kept for the next question."""

import argparse

from autoshard.cache import clear, folder
from autoshard.cli.output import write_text
from autoshard.sizes import format_bytes

NAME = "cache"
HELP = "remove the captured steps that are kept"
DESCRIPTION = """\
A captured step is kept in the user's cache directory (AUTOSHARD_CACHE_DIR names another one), so that a second question
about the same model takes no capture. It is used only while every file it was made from is as it was."""
EPILOG = """\
examples:
  autoshard cache clear"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("action", choices=("clear",), help="clear removes all kept steps")


def run(args: argparse.Namespace) -> int:
    """Remove the steps and say how much that was."""
    num_files, num_bytes = clear()
    write_text(f"removed {num_files} captured steps ({format_bytes(num_bytes)}) from {folder()}")
    return 0
