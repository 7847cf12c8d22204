"""``autoshard plan``: a model file and a request to a plan."""

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from autoshard.cli.collection import seldom_collected
from autoshard.cli.deferred import defer_compiler
from autoshard.cli.dump import DUMPS, format_dump, format_record
from autoshard.cli.options import add_attention_option, add_request_options, positive, read_request
from autoshard.cli.output import write_bytes, write_error, write_text
from autoshard.cli.progress import Progress
from autoshard.cli.source import plan_source
from autoshard.errors import PlanFormatError
from autoshard.plan import Plan, encode_plan, require_supported, save_plan
from autoshard.plan.save import require_writable, write_whole
from autoshard.report import format_diagnostics, format_plan, format_table, format_verdict, memory_table, units_table
from autoshard.report.table import Table
from autoshard.request import LEVELS, resolve

if TYPE_CHECKING:
    from autoshard.pipeline import PlanResult

NAME = "plan"
HELP = "decide how a model is sharded"
DESCRIPTION = """\
Run one training step of a model on fake tensors (no weights, no GPU), and decide which modules shard together.

The model file is Python: build_model() gives the model, example_inputs(batch=None, seq=None) the inputs of one
training step as (args, kwargs), and, if it is there, loss(outputs) the loss. A transformers model needs no model file:
its config.json, or the folder that holds it, will do. Inputs that are not given are made for it, and named."""
EPILOG = """\
examples:
  autoshard plan model.py --device cpu --devices 2 --memory 256MiB
  autoshard plan model.py:tiny -o plan.json --device h100-80gb --devices 8 --batch 4 --seq 2048
  autoshard plan path/to/config.json --batch 4 --seq 4096
  autoshard plan my.package:build --devices 16 --mesh 2x8 --json > plan.json

Without -o nothing is written. `autoshard --help` lists the exit codes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="model.py, model.py:factory, package.module:factory, or a transformers config.json or its folder",
    )
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan to this file")
    add_request_options(parser)
    step = parser.add_argument_group("the training step")
    step.add_argument("--batch", type=positive, metavar="N", help="batch size of the inputs")
    step.add_argument("--seq", type=positive, metavar="N", help="sequence length of the inputs")
    step.add_argument("--image-size", type=positive, metavar="N", help="edge of the images in the inputs, in pixels")
    step.add_argument("--entry", metavar="NAME", help="method that runs the step (default: forward)")
    step.add_argument(
        "--frontend",
        choices=("trace", "tree"),
        default="trace",
        help="trace runs the step; tree needs no inputs, sees only the modules, and marks the plan as assumed",
    )
    step.add_argument(
        "--no-outline",
        dest="outline",
        action="store_false",
        help="trace every block, also those that are alike; the plan is the same, and takes longer",
    )
    step.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help="capture the step again, and keep nothing of it for the next question",
    )
    step.add_argument(
        "--verify",
        choices=LEVELS,
        default="rules",
        help="how the plan is verified: by the rules, or also by one step of the sharded model on fake tensors",
    )
    add_attention_option(step)
    step.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that lies beside a config.json"
    )
    shown = parser.add_argument_group("what is printed")
    form = shown.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan file and nothing else")
    form.add_argument("--dump", choices=DUMPS, help="print what a stage found instead of the tables")
    shown.add_argument(
        "--timeline", metavar="FILE", help="also write the step under the plan to this file, event by event, as JSON"
    )
    shown.add_argument("--timings", action="store_true", help="print on stderr where the time went")
    shown.add_argument("--quiet", action="store_true", help="print one line, and no progress")


@seldom_collected
def run(args: argparse.Namespace) -> int:
    """Plan, write and print."""
    defer_compiler()
    request = read_request(args)
    # Told before torch is imported and any work is done.
    resolve(request)
    for path in (args.output, args.timeline):
        if path is not None:
            require_writable(path)
    progress = Progress(lambda stage: None if args.quiet else write_error(stage))
    # What the user's own code prints must not get into the JSON.
    with progress, contextlib.redirect_stdout(sys.stderr):
        result = plan_source(args, request, progress)
    progress.timings.begin("writing")
    if args.output is not None:
        save_plan(result.plan, args.output)
    if args.timeline is not None:
        write_whole(args.timeline, format_record(result))
    _warn_if_unsupported(result.plan)
    _print(args, result)
    if args.timings:
        headers = ("stage", "seconds", "cpu seconds")
        rows = tuple(progress.timings.rows())
        write_error(format_table(Table(title="where the time went", headers=headers, rows=rows, numeric=headers[1:])))
    return 0


def _print(args: argparse.Namespace, result: "PlanResult") -> None:
    plan = result.plan
    if args.json:
        write_bytes(encode_plan(plan))
    elif args.dump:
        write_text(format_dump(args.dump, result))
    elif args.quiet:
        write_text(format_verdict(plan))
    elif args.output is None:
        write_text(format_plan(plan))
        write_text("\nnothing was written; -o PLAN writes the plan to a file")
    else:
        write_text(f"{format_verdict(plan)}\nwritten to {args.output}; `autoshard inspect {args.output}` shows it all")
        write_text(f"\n{format_table(units_table(plan))}\n\n{format_table(memory_table(plan))}")
        if warnings := [found for found in plan.diagnostics if found.severity != "note"]:
            write_text(f"\n{format_diagnostics(tuple(warnings))}")


def _warn_if_unsupported(plan: Plan) -> None:
    try:
        require_supported(plan)
    except PlanFormatError as error:
        write_error(f"warning: apply_plan will refuse this plan at {error.where}: {error.reason}")
