"""How a command ends: errors to one message and one exit code, never a traceback unless it was asked for."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable

from autoshard.cli.output import close_quietly, flush, write_error
from autoshard.errors import AutoshardError

EXIT_CODES = (
    (0, "fine"),
    (1, "a bug of autoshard"),
    (2, "usage, request or model file"),
    (3, "no plan fits, or none is legal"),
    (4, "plan file"),
    (5, "the plan is for another model or mesh, or ranks disagree"),
    (6, "the training step could not be captured"),
    (7, "applying failed"),
    (8, "verification found violations"),
    (130, "interrupted"),
)
"""All exit codes and what they mean."""

INTERRUPTED = 130
BROKEN_PIPE = 141
"""128 and the number of the signal, as a shell reports a program that the signal ended."""

DEBUG_VARIABLE = "AUTOSHARD_DEBUG"


def run_command(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Exit code of a command; whatever it raises is told on stderr.

    Args:
        command: takes the parsed arguments, prints, returns an exit code.
        args: the arguments; ``debug`` asks for tracebacks.
    """
    try:
        code = command(args)
        flush()
        return code
    except AutoshardError as error:
        _show_traceback(args)
        write_error(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _show_traceback(args)
        write_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough (`autoshard inspect plan.json | head`).
        close_quietly()
        return BROKEN_PIPE
    except Exception as error:
        shown = _show_traceback(args)
        hint = "" if shown else f"; {DEBUG_VARIABLE}=1 shows the traceback"
        name = f"{type(error).__name__}: {error}"
        write_error(f"error: {name}\n  this is a bug of autoshard, please report it{hint}")
        return 1


def _show_traceback(args: argparse.Namespace) -> bool:
    asked = args.debug or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    if asked:
        traceback.print_exc(file=sys.stderr)
    return asked
