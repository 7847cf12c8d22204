"""The commands and what they have in common."""

import argparse
from typing import NoReturn

from autoshard import __version__
from autoshard.cli import cache, calibrate, compare, explain, fit, inspect, measure, plan, sweep, verify
from autoshard.cli.exits import EXIT_CODES
from autoshard.cli.output import write_error

_CODES = "\n".join(f"  {code:<5}{meaning}" for code, meaning in EXIT_CODES)
_EPILOG = f"""\
examples:
  autoshard plan model.py --device h100-80gb --devices 8            look, write nothing
  autoshard plan model.py -o plan.json --devices 8 --memory 60GiB   decide, write the plan
  autoshard inspect plan.json                                       read a plan again
  autoshard verify plan.json model.py                               is it right for this model?
  autoshard measure plan.json model.py                              real steps beside the projection
  autoshard explain AS203                                           what a diagnostic means

exit codes:
{_CODES}
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like all others."""

    def error(self, message: str) -> NoReturn:
        write_error(f"error: {message}\n  remedy: see `{self.prog} --help`")
        raise SystemExit(2)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``run`` of its result is the command's function."""
    parser = _Parser(
        prog="autoshard",
        description="Decide how a PyTorch model is sharded with FSDP2, before any GPU is rented.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"autoshard {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (plan, inspect, verify, measure, calibrate, fit, sweep, compare, explain, cache):
        added = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(added)
        added.add_argument("--debug", action="store_true", help="show the traceback of an error (or AUTOSHARD_DEBUG=1)")
        added.set_defaults(run=command.run)
    return parser
