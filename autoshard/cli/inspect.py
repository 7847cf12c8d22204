"""``autoshard inspect``: a plan file to text."""

import argparse

from autoshard.cli.output import write_bytes, write_text
from autoshard.plan import encode_plan, load_plan
from autoshard.report import format_plan

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

`autoshard --help` lists the exit codes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("plan", metavar="PLAN", help="the plan file")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan in its one form and nothing else")
    form.add_argument("--all", action="store_true", help="show notes and every repeated diagnostic too")


def run(args: argparse.Namespace) -> int:
    """Load and print."""
    plan = load_plan(args.plan)
    if args.json:
        write_bytes(encode_plan(plan))
    else:
        write_text(format_plan(plan, detail=args.all))
    return 0
