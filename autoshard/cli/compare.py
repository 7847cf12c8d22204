"""``autoshard compare``: plans that are there already, beside ours."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from autoshard.cli.collection import seldom_collected
from autoshard.cli.options import add_request_options, add_subject_arguments, read_request
from autoshard.cli.output import write_bytes, write_error, write_text
from autoshard.cli.progress import Progress
from autoshard.cli.source import load_subject
from autoshard.hardware import known_profiles
from autoshard.plan import Plan, load_plan
from autoshard.report import Table, format_diagnostics, format_table
from autoshard.request import OPTIMIZERS, Request, resolve
from autoshard.sizes import format_bytes, format_ns

if TYPE_CHECKING:
    from autoshard.studies import Score

NAME = "compare"
HELP = "score plans beside ours"
DESCRIPTION = """\
Score plan files, whoever wrote them, by the same cost model as ours, and hold them against the rules: time, peak, and
what is wrong. What is not given is that of the first plan: its device, its devices, its optimizer and its allowance.
Each plan keeps its own mesh and precision."""
EPILOG = """\
examples:
  autoshard compare plan.json model.py
  autoshard compare mine.json theirs.json model.py --device a100-40gb
  autoshard compare plan.json path/to/config.json --json

`autoshard --help` lists the exit codes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("plans", nargs="+", metavar="PLAN", help="plan files")
    add_subject_arguments(parser)
    add_request_options(parser)
    parser.add_argument("--json", action="store_true", help="print the scores as JSON and nothing else")


@seldom_collected
def run(args: argparse.Namespace) -> int:
    """Score and print."""
    from autoshard.studies import compare_plans

    plans = {path: load_plan(path) for path in args.plans}
    request = like_plan(read_request(args), plans[args.plans[0]])
    resolve(request)
    with Progress(write_error) as progress, contextlib.redirect_stdout(sys.stderr):
        subject = load_subject(args, progress)
        scores = compare_plans(subject, request, plans, args.batch, args.seq)
        question = subject.question(request)
    if args.json:
        write_bytes(msgspec.json.format(msgspec.json.encode([_json(score) for score in scores]), indent=2) + b"\n")
    else:
        write_text(
            _told(scores, f"{question.profile.name} × {question.num_devices}, {format_bytes(question.allowed_bytes)}")
        )
    return 0


def like_plan(request: Request, plan: Plan) -> Request:
    """The request with what it leaves open taken from a plan, as far as it is known here."""
    made = plan.provenance
    device = request.device
    if device is None and made.device in known_profiles():
        device = made.device
    is_same = device == made.device
    return replace(
        request,
        device=device,
        devices=plan.num_devices if request.devices is None and request.mesh == "auto" else request.devices,
        memory=plan.projection.allowed_bytes if request.memory is None and is_same else request.memory,
        precision=_precision(plan) if request.precision is None else request.precision,
        optimizer=made.optimizer
        if request.optimizer == Request().optimizer and made.optimizer in OPTIMIZERS
        else request.optimizer,
    )


def _precision(plan: Plan) -> str | None:
    return {"bfloat16": "bf16", "same": "fp32"}.get(plan.precision.param)


def _json(score: "Score") -> dict[str, Any]:
    return {name: getattr(score, name) for name in score.__slots__}


def _told(scores: "Sequence[Score]", where: str) -> str:
    ours = scores[0]
    rows = []
    for score in scores:
        known = score.verdict in ("fits", "does not fit")
        gain = f"{score.step_ns / ours.step_ns:.3f}" if known and ours.step_ns else "–"
        rows.append(
            (
                score.name,
                score.verdict,
                str(score.num_units),
                str(score.num_recompute),
                format_bytes(score.peak_bytes) if known else "–",
                format_ns(score.step_ns) if known else "–",
                gain,
                str(sum(found.severity == "error" for found in score.findings)),
            )
        )
    table = Table(
        title=f"plans on {where} allowed; times are estimates of the cost model",
        headers=("plan", "verdict", "units", "recompute", "peak", "step", "to ours", "errors"),
        rows=tuple(rows),
        numeric=("units", "recompute", "peak", "step", "to ours", "errors"),
    )
    parts = [format_table(table)]
    for score in scores:
        serious = tuple(found for found in score.findings if found.severity != "note")
        if serious:
            parts.append(f"{score.name}\n{format_diagnostics(serious)}")
    return "\n\n".join(parts)
