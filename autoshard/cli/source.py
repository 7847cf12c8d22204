"""What the user names as the model: a model file, or a transformers configuration."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.request import Request

if TYPE_CHECKING:
    from torch import nn

    from autoshard.cli.progress import Progress
    from autoshard.pipeline import PlanResult

CONFIG_NAME = "config.json"


def plan_source(args: argparse.Namespace, request: Request, progress: "Progress") -> "PlanResult":
    """The plan for the model that the arguments name.

    Args:
        args: the arguments of a command that plans.
        request: what is asked.
        progress: told the name of each stage as it begins.

    Raises:
        AutoshardError: there is no such model, or no plan for it.
    """
    if is_config(args.model):
        return _plan_config(args, request, progress)
    from autoshard.pipeline import plan_model_file

    return plan_model_file(
        args.model,
        request,
        batch=args.batch,
        seq=args.seq,
        image_size=args.image_size,
        entry=args.entry,
        frontend=args.frontend,
        default_inputs=lambda model: _default_inputs(model, args),
        progress=progress,
    )


def is_config(spec: str) -> bool:
    """Whether this is a configuration: a ``config.json``, or a folder that holds one."""
    return spec.endswith(CONFIG_NAME) or (Path(spec) / CONFIG_NAME).is_file()


def _plan_config(args: argparse.Namespace, request: Request, progress: "Progress") -> "PlanResult":
    from autoshard.integrations.transformers import build_from_config, make_inputs
    from autoshard.pipeline import run_pipeline

    progress(f"building {args.model}")
    built = build_from_config(args.model, trust_remote_code=args.trust_remote_code)
    inputs, assumed = None, built.assumed
    if args.frontend != "tree":
        made = make_inputs(built.model, args.model, batch=args.batch, seq=args.seq, image_size=args.image_size)
        inputs, assumed = made.pair, (*assumed, *made.assumed)
    return run_pipeline(
        built.model,
        inputs,
        loss=None,
        entry=args.entry or "forward",
        request=request,
        frontend=args.frontend,
        progress=progress,
        assumed=assumed,
    )


def _default_inputs(model: "nn.Module", args: argparse.Namespace) -> tuple[Any, tuple[str, ...]] | None:
    """Inputs for a model file that gives none, where its model is one of transformers'."""
    if "transformers" not in sys.modules:
        return None
    from autoshard.integrations.transformers import has_config, make_inputs

    if not has_config(model):
        return None
    made = make_inputs(model, args.model, batch=args.batch, seq=args.seq, image_size=args.image_size)
    return made.pair, made.assumed
