"""``autoshard verify``: is a plan, whoever made it, right for a model?"""

import argparse
import contextlib
import functools
import sys

import msgspec

from autoshard.cli.collection import seldom_collected
from autoshard.cli.options import add_attention_option, positive
from autoshard.cli.output import write_bytes, write_error, write_text
from autoshard.cli.progress import Progress
from autoshard.cli.source import load_for_training, num_param_bytes, verify_source
from autoshard.errors import Diagnostic, RequestError, VerificationError
from autoshard.plan import Plan, load_plan
from autoshard.report import format_diagnostics
from autoshard.request import LEVELS
from autoshard.sizes import format_bytes

NAME = "verify"
HELP = "check a plan against a model, also a plan written by hand"
DESCRIPTION = """\
Look for everything that is wrong with a plan for a model: by the rules of FSDP2 first, then by one training step of the
really sharded model on fake tensors, with as many ranks as the plan has devices. No weights and no GPU are needed.

--train N goes further: N real steps on two CPU processes are compared with the same steps in one."""
EPILOG = """\
examples:
  autoshard verify plan.json model.py
  autoshard verify plan.json model.py --level rules
  autoshard verify plan.json model.py:tiny --train 3
  autoshard verify plan.json path/to/config.json --json

Ends with 8 if something is wrong. `autoshard --help` lists the exit codes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("plan", metavar="PLAN", help="the plan file")
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="model.py, model.py:factory, package.module:factory, or a transformers config.json or its folder",
    )
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="dry-run",
        help="rules alone, or also one step of the sharded model on fake tensors (default: dry-run)",
    )
    parser.add_argument("--train", type=positive, metavar="N", help="also train N real steps on two processes")
    parser.add_argument("--batch", type=positive, metavar="N", help="batch size of the inputs")
    parser.add_argument("--seq", type=positive, metavar="N", help="sequence length of the inputs")
    parser.add_argument("--image-size", type=positive, metavar="N", help="edge of the images in the inputs, in pixels")
    add_attention_option(parser)
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that lies beside a config.json"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the findings as JSON and nothing else")
    form.add_argument("--all", action="store_true", help="show notes and every repeated finding too")


@seldom_collected
def run(args: argparse.Namespace) -> int:
    """Verify and print."""
    plan = load_plan(args.plan)
    progress = Progress(write_error)
    # What the user's own code prints must not get among the findings.
    with progress, contextlib.redirect_stdout(sys.stderr):
        found = verify_source(args, plan, progress)
        # A plan that cannot work on fake tensors would only fail once more, and slower.
        if args.train is not None and not _errors(found):
            progress(f"training {args.train} steps on two processes")
            found = (*found, *_train(args, plan))
    if args.json:
        write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    else:
        _print(args, plan, found)
    return VerificationError.exit_code if _errors(found) else 0


def _errors(found: tuple[Diagnostic, ...]) -> int:
    return sum(each.severity == "error" for each in found)


def _train(args: argparse.Namespace, plan: Plan) -> tuple[Diagnostic, ...]:
    from autoshard.runtime.trial import MAX_BYTES, train_beside_reference

    num_bytes = num_param_bytes(args)
    if num_bytes > MAX_BYTES:
        raise RequestError(
            "train",
            args.train,
            f"a model of at most {format_bytes(MAX_BYTES)} of parameters, and this one has {format_bytes(num_bytes)}",
            "take a smaller configuration of the same classes, and a plan for it",
        )
    return train_beside_reference(functools.partial(load_for_training, args), plan, args.train)


def _print(args: argparse.Namespace, plan: Plan, found: tuple[Diagnostic, ...]) -> None:
    passed = ["the rules"]
    if args.level == "dry-run":
        passed.append(f"a dry run on {plan.num_devices} ranks")
    if args.train is not None:
        passed.append(f"{args.train} real steps on 2 ranks")
    num_errors = _errors(found)
    if num_errors:
        write_text(f"{args.plan} is not right for {args.model}: {num_errors} {'errors' if num_errors > 1 else 'error'}")
    else:
        noted = len(found) if not args.all else 0
        told = f" ({noted} to know, --all shows {'them' if noted > 1 else 'it'})" if noted else ""
        write_text(f"{args.plan} is right for {args.model}: it passes {_listed(passed)}{told}")
    asks = any(each.severity != "note" for each in found)
    if found and (args.all or asks):
        write_text("\n" + format_diagnostics(found, detail=args.all))


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
