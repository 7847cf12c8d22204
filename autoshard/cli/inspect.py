"""``autoshard inspect``: a plan file to text."""

import argparse

import msgspec

from autoshard.cli.output import write_bytes, write_text
from autoshard.plan import Plan, encode_plan, load_plan
from autoshard.report import format_memory, format_plan, memory_figures

NAME = "inspect"
HELP = "read a plan file"
DESCRIPTION = """\
Show what a plan file decides and what it will cost. Needs neither the model nor torch.

The file is read strictly: what apply_plan would refuse as a plan file is refused here, with its JSON path."""
EPILOG = """\
examples:
  autoshard inspect plan.json
  autoshard inspect plan.json --all
  autoshard inspect plan.json --json | python -m json.tool
  autoshard inspect plan.json --memory
  autoshard inspect plan.json --memory --json

`autoshard --help` lists the exit codes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("plan", metavar="PLAN", help="the plan file")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="show where the bytes of a step go: by kind and phase, what the peak is made of, the step's course",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json",
        action="store_true",
        help="print the plan in its one form (with --memory that part of it) and nothing else",
    )
    form.add_argument("--all", action="store_true", help="show notes and every repeated diagnostic too")


def run(args: argparse.Namespace) -> int:
    """Load and print."""
    plan = load_plan(args.plan)
    if args.memory:
        _memory(plan, args.json)
    elif args.json:
        write_bytes(encode_plan(plan))
    else:
        write_text(format_plan(plan, detail=args.all))
    return 0


def _memory(plan: Plan, as_json: bool) -> None:
    if as_json:
        write_bytes(msgspec.json.format(msgspec.json.encode(memory_figures(plan)), indent=2) + b"\n")
    else:
        write_text(format_memory(plan))
