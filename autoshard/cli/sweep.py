"""``autoshard sweep``: a table over devices, batch and memory."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from autoshard.cli.collection import seldom_collected
from autoshard.cli.options import add_request_options, add_subject_arguments, positive, read_request
from autoshard.cli.output import write_bytes, write_error, write_text
from autoshard.cli.progress import Progress
from autoshard.cli.source import load_subject
from autoshard.report import Table, format_table
from autoshard.request import resolve
from autoshard.sizes import format_bytes, format_ns, parse_bytes

if TYPE_CHECKING:
    from autoshard.studies import Cell

NAME = "sweep"
HELP = "a table of plans over devices, batch and memory"
DESCRIPTION = """\
Plan a model for each of a grid of numbers of devices, batch sizes and allowances. The step is run once for each batch
size; batch and sequence are those of one device."""
EPILOG = """\
examples:
  autoshard sweep model.py --devices 8,16,32 --memory 40GiB,60GiB
  autoshard sweep model.py --device a100-40gb --batch 1,2,4,8
  autoshard sweep model.py --devices 8,64 --batch 1,4 --json

`autoshard --help` lists the exit codes."""

_Value = TypeVar("_Value")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_subject_arguments(parser, sizes=False)
    grid = parser.add_argument_group("the grid, values with commas between them")
    grid.add_argument("--devices", type=_listed(positive), metavar="N,N", help="numbers of devices")
    grid.add_argument("--batch", type=_listed(positive), metavar="N,N", help="batch sizes")
    grid.add_argument(
        "--memory", type=_listed(_size), metavar="SIZE,SIZE", help="what tensors may occupy on one device"
    )
    grid.add_argument("--seq", type=positive, metavar="N", help="sequence length of the inputs")
    add_request_options(parser, grid=True)
    parser.add_argument("--json", action="store_true", help="print the cells as JSON and nothing else")


def _listed(read: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    def read_list(text: str) -> tuple[_Value, ...]:
        try:
            return tuple(dict.fromkeys(read(part) for part in text.split(",")))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not a list of values with commas between them") from None

    return read_list


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not {error}") from None


@seldom_collected
def run(args: argparse.Namespace) -> int:
    """Ask and print."""
    from autoshard.studies import sweep

    fields = {name: value for name, value in vars(args).items() if name not in ("devices", "memory")}
    request = read_request(argparse.Namespace(**fields))
    resolve(request)
    with Progress(write_error) as progress, contextlib.redirect_stdout(sys.stderr):
        subject = load_subject(args, progress)
        cells = list(
            sweep(subject, request, args.devices or (None,), args.batch or (None,), args.memory or (None,), args.seq)
        )
        assumed = subject.question(request).assumed
    if args.json:
        write_bytes(msgspec.json.format(msgspec.json.encode([_json(cell) for cell in cells]), indent=2) + b"\n")
    else:
        write_text(_told(args, cells, assumed))
    return 0


def _json(cell: "Cell") -> dict[str, Any]:
    row: dict[str, Any] = {
        "devices": cell.devices,
        "batch": cell.batch,
        "seq": cell.seq,
        "allowed_bytes": cell.allowed_bytes,
        "fits": cell.answer is not None,
    }
    if cell.answer is not None:
        found = cell.answer.found
        row |= {
            "step_ns": found.timeline.step_ns,
            "peak_bytes": found.timeline.peak_bytes,
            "exposed_ns": found.timeline.exposed_ns,
            "num_units": len(found.decisions.units),
            "num_recompute": len(found.decisions.recompute),
            "optimal": found.optimal.status,
            "gap": found.optimal.gap,
        }
    elif cell.error is not None:
        row |= {"missing_bytes": cell.error.missing_bytes, "bottleneck": cell.error.bottleneck}
    return row


def _told(args: argparse.Namespace, cells: "list[Cell]", assumed: tuple[str, ...]) -> str:
    rows = []
    for cell in cells:
        start = (
            str(cell.devices),
            "as given" if cell.batch is None else str(cell.batch),
            format_bytes(cell.allowed_bytes),
        )
        if cell.answer is None:
            missing = cell.error.missing_bytes if cell.error is not None else 0
            rows.append((*start, "–", "–", "–", "–", f"no plan: {format_bytes(missing)} missing"))
            continue
        found = cell.answer.found
        gap = f" (gap {100 * found.optimal.gap:.2f} %)" if found.optimal.status == "bounded" else ""
        rows.append(
            (
                *start,
                format_ns(found.timeline.step_ns),
                format_bytes(found.timeline.peak_bytes),
                str(len(found.decisions.units)),
                str(len(found.decisions.recompute)),
                found.optimal.status + gap,
            )
        )
    table = Table(
        title=f"plans of {args.model}; times are estimates of the cost model",
        headers=("devices", "batch", "allowed", "step", "peak", "units", "recompute", "optimal"),
        rows=tuple(rows),
        numeric=("devices", "batch", "allowed", "step", "peak", "units", "recompute"),
    )
    given = {name for name in ("devices", "memory") if getattr(args, name) is not None}
    named = [text for text in assumed if text.partition("=")[0] not in given]
    lines = "\n".join(["", "", "assumed, because not given", *(f"  {text}" for text in named)]) if named else ""
    return format_table(table) + lines
