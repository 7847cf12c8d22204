"""``autoshard fit``: the fewest devices, the largest batch or sequence, the least memory that have a plan."""

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from autoshard.cli.options import add_request_options, add_subject_arguments, positive, read_request
from autoshard.cli.output import write_bytes, write_error, write_text
from autoshard.cli.progress import Progress
from autoshard.cli.source import load_subject
from autoshard.errors import RequestError
from autoshard.report import Table, format_table
from autoshard.request import Request, resolve
from autoshard.sizes import format_bytes, format_ns

if TYPE_CHECKING:
    from autoshard.studies import Fitted, Subject

NAME = "fit"
HELP = "the fewest devices, largest batch or sequence, least memory that have a plan"
DESCRIPTION = """\
Find by bisection what just fits: each answer is a plan, and the next value has none. What is not searched for is as
asked or assumed. Batch and sequence are those of one device; the step is run once for each of them that is tried."""
EPILOG = """\
examples:
  autoshard fit model.py --device a100-40gb
  autoshard fit model.py --find batch --devices 8 --device h100-80gb
  autoshard fit model.py --find seq --seq-step 512 --batch 1
  autoshard fit model.py --find devices --find memory --json

`autoshard --help` lists the exit codes."""

FINDS = ("devices", "memory", "batch", "seq")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_subject_arguments(parser)
    add_request_options(parser)
    search = parser.add_argument_group("what is searched for")
    search.add_argument(
        "--find", action="append", choices=FINDS, help="may be given again (default: devices and memory)"
    )
    search.add_argument("--max-devices", type=positive, default=4096, metavar="N", help="no more devices than this")
    search.add_argument("--max-size", type=positive, default=2**20, metavar="N", help="no larger batch or sequence")
    search.add_argument(
        "--seq-step", type=positive, default=128, metavar="N", help="sequence lengths are its multiples"
    )
    parser.add_argument("--json", action="store_true", help="print the answers as JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    """Search and print."""
    request = read_request(args)
    resolve(request)
    finds = tuple(dict.fromkeys(args.find or ("devices", "memory")))
    for find in ("batch", "seq"):
        if find in finds and getattr(args, find) is not None:
            raise RequestError(
                find, getattr(args, find), f"nothing, since the largest {find} is searched for", f"leave out --{find}"
            )
    with Progress(write_error) as progress, contextlib.redirect_stdout(sys.stderr):
        subject = load_subject(args, progress)
        found = [_find(subject, request, find, args) for find in finds]
    if args.json:
        write_bytes(msgspec.json.format(msgspec.json.encode([_row(each) for each in found]), indent=2) + b"\n")
    else:
        write_text(_told(args, found))
    return 0


def _find(subject: "Subject", request: Request, find: str, args: argparse.Namespace) -> "Fitted":
    from autoshard.studies import fewest_devices, largest_size, least_memory

    if find == "devices":
        return fewest_devices(subject, request, args.batch, args.seq, args.max_devices)
    if find == "memory":
        return least_memory(subject, request, args.batch, args.seq)
    if find == "batch":
        return largest_size(subject, request, "batch", seq=args.seq, most=args.max_size)
    return largest_size(subject, request, "seq", batch=args.batch, step=args.seq_step, most=args.max_size)


def _row(found: "Fitted") -> dict[str, Any]:
    row: dict[str, Any] = {"what": found.what, "value": found.value, "beyond": found.beyond}
    if found.answer is not None:
        timeline, question = found.answer.found.timeline, found.answer.question
        row |= {
            "device": question.profile.name,
            "devices": question.num_devices,
            "allowed_bytes": question.allowed_bytes,
            "peak_bytes": timeline.peak_bytes,
            "step_ns": timeline.step_ns,
            "num_recompute": len(found.answer.found.decisions.recompute),
        }
    if found.error is not None:
        row |= {"missing_bytes": found.error.missing_bytes, "bottleneck": found.error.bottleneck}
    return row


def _told(args: argparse.Namespace, found: "list[Fitted]") -> str:
    names = {"devices": "fewest devices", "memory": "least memory", "batch": "largest batch", "seq": "longest sequence"}
    rows = []
    for each in found:
        show = format_bytes if each.what == "memory" else str
        next_one = "nothing beyond was asked for" if each.beyond is None else f"{show(each.beyond)}: no plan"
        if each.beyond is not None and each.error is not None:
            next_one += f", {format_bytes(each.error.missing_bytes)} missing"
        if each.answer is None:
            rows.append((names[each.what], "none", "", "", "", "", next_one))
            continue
        timeline, question = each.answer.found.timeline, each.answer.question
        rows.append(
            (
                names[each.what],
                show(each.value or 0),
                f"{question.profile.name} × {question.num_devices}",
                format_bytes(timeline.peak_bytes),
                format_ns(timeline.step_ns),
                str(len(each.answer.found.decisions.recompute)),
                next_one,
            )
        )
    table = Table(
        title=f"what just fits, for {args.model}; times are estimates of the cost model",
        headers=("found", "value", "devices", "peak", "step", "recompute", "beyond"),
        rows=tuple(rows),
        numeric=("value", "peak", "step", "recompute"),
    )
    assumed = next((each.answer.question.assumed for each in found if each.answer is not None), ())
    lines = "\n".join(["", "", "assumed, because not given", *(f"  {text}" for text in assumed)]) if assumed else ""
    return format_table(table) + lines
