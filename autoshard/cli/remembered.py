"""Plans from steps that were captured before, and captured steps kept for the next question."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.cache import CachedStep, Recorder, environment, is_unchanged, key_of, load, own_digest, save
from autoshard.hardware.presence import may_have_accelerator
from autoshard.request import Question, Request, resolve

if TYPE_CHECKING:
    from autoshard.cli.progress import Progress
    from autoshard.pipeline import PlanResult

Planner = Callable[[argparse.Namespace, Request, "Progress"], "PlanResult"]


def with_cache(args: argparse.Namespace, request: Request, progress: "Progress", plan: Planner) -> "PlanResult":
    """The plan, from a kept step where there is one, else from ``plan``, whose step is kept.

    Args:
        args: the arguments of a command that plans.
        request: what is asked.
        progress: told the name of each stage as it begins.
        plan: builds, captures and plans.

    Raises:
        AutoshardError: whatever planning raises.
    """
    question = _question(args, request)
    if question is None:
        return plan(args, request, progress)
    key = key_of(_parts(args, question))
    progress("looking for a captured step")
    step = load(key)
    if step is not None and is_unchanged(step.files):
        from autoshard.pipeline import plan_captured

        return plan_captured(step.graph, question, step.assumed, progress)
    with Recorder() as recorder:
        result = plan(args, request, progress)
    if recorder.is_certain:
        assumed = result.plan.provenance.assumed[len(question.assumed) :]
        save(key, CachedStep(graph=result.graph, assumed=assumed, files=recorder.files()))
    return result


def _question(args: argparse.Namespace, request: Request) -> Question | None:
    """The question, if a kept step may answer it: all of it can be known without the model and without torch."""
    may_be_kept = args.cache and args.frontend == "trace" and args.verify == "rules" and args.outline
    if not may_be_kept or request.methods or args.trust_remote_code or may_have_accelerator():
        return None
    return resolve(request)


def _parts(args: argparse.Namespace, question: Question) -> dict[str, object]:
    """Everything that decides a captured step and is known before."""
    path = Path(args.model.partition(":")[0]).absolute()
    place = path if path.is_dir() else path.parent
    # A file that was not there could be found now; a plan that is written beside a model file is none of its sources.
    kinds = {".py"} if path.suffix == ".py" else {".py", ".json"}
    beside = [each.name for each in place.iterdir() if each.suffix in kinds] if place.is_dir() else []
    return {
        "model": args.model,
        "path": str(path),
        "folder": os.getcwd(),
        "beside": sorted(beside),
        "sizes": [args.batch, args.seq, args.image_size],
        "entry": args.entry,
        "attention": args.attention,
        "compute_dtype": question.compute_dtype,
        "device_kind": question.profile.kind,
        "autoshard": own_digest(),
        "python": [sys.version, sys.executable, sys.path],
        "environment": environment(),
    }
