"""The command line: ``autoshard plan``, ``inspect`` and ``explain``.

Arguments in, one call of the pipeline, text out. Only this folder prints or exits. Nothing here imports torch or
networkx before a command needs it, so that reading a plan takes a tenth of a second.
"""

from collections.abc import Sequence

from autoshard.cli.exits import run_command
from autoshard.cli.parser import make_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments, those of the process if not given.

    Returns:
        The exit code: 0 fine, otherwise that of the error's class (``autoshard --help`` lists them).
    """
    try:
        args = make_parser().parse_args(argv)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 2
    return run_command(args.run, args)


__all__ = ["main"]
