"""What the user names as the model: a model file, or a transformers configuration."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.cli.remembered import with_cache
from autoshard.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from autoshard.cli.progress import Progress
    from autoshard.errors import Diagnostic
    from autoshard.integrations.transformers import MadeInputs
    from autoshard.pipeline import PlanResult
    from autoshard.plan import Plan
    from autoshard.runtime.trial import Case
    from autoshard.studies import Subject

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
    return with_cache(args, request, progress, _plan)


def _plan(args: argparse.Namespace, request: Request, progress: "Progress") -> "PlanResult":
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
        outline=args.outline,
        verify=args.verify,
        attention=args.attention,
        default_inputs=lambda model: _default_inputs(model, args),
        progress=progress,
    )


def verify_source(args: argparse.Namespace, plan: "Plan", progress: "Progress") -> "tuple[Diagnostic, ...]":
    """What is found of a plan for the model that the arguments name.

    Args:
        args: the arguments of a command that verifies: ``model``, ``level`` and the sizes of the inputs.
        plan: the plan.
        progress: told the name of each stage as it begins.

    Raises:
        AutoshardError: there is no such model, or its step cannot be captured.
    """
    from autoshard.capture.substitute import substituted
    from autoshard.pipeline import verify_model, verify_model_file

    if is_config(args.model):
        with substituted(args.attention):
            model, inputs, _ = _read_config(args, progress)
            return verify_model(model, plan, inputs, level=args.level, progress=progress)
    return verify_model_file(
        plan,
        args.model,
        level=args.level,
        batch=args.batch,
        seq=args.seq,
        image_size=args.image_size,
        attention=args.attention,
        default_inputs=lambda model: _default_inputs(model, args),
        progress=progress,
    )


def load_subject(args: argparse.Namespace, progress: "Progress") -> "Subject":
    """The model that the arguments name, to be asked any number of questions.

    Args:
        args: the arguments of a command that asks: ``model``, ``image_size``, ``entry``.
        progress: told what begins.

    Raises:
        AutoshardError: there is no such model.
    """
    from autoshard.capture import build_model, load_model_file
    from autoshard.studies import Subject

    entry = args.entry or "forward"
    if is_config(args.model):
        from autoshard.integrations.transformers import build_from_config, make_inputs

        progress(f"building {args.model}")
        model = build_from_config(args.model, trust_remote_code=args.trust_remote_code).model

        def made(batch: int | None, seq: int | None) -> Any:
            return make_inputs(model, args.model, batch=batch, seq=seq, image_size=args.image_size).pair

        return Subject(model, made, None, entry, progress)
    progress(f"loading {args.model}")
    model_file = load_model_file(args.model)
    built = build_model(model_file)

    def inputs(batch: int | None, seq: int | None) -> Any:
        sized = argparse.Namespace(**{**vars(args), "batch": batch, "seq": seq})
        default = _default_inputs(built, sized) if model_file.example_inputs is None else None
        return model_file.inputs(batch, seq, args.image_size) if default is None else default[0]

    return Subject(built, inputs, model_file.loss, entry, progress)


def load_for_capture(args: argparse.Namespace) -> "Case":
    """The model that the arguments name without its values, its inputs and its loss.

    Raises:
        AutoshardError: it cannot be built, or has no inputs.
    """
    from autoshard.capture import build_model, load_model_file
    from autoshard.capture.inputs import read_pairs
    from autoshard.capture.substitute import stay_substituted
    from autoshard.runtime.trial import Case

    stay_substituted(args.attention)
    if is_config(args.model):
        model, inputs, _ = _read_config(args, _in_silence)
        return Case(model=model, pairs=read_pairs(inputs))
    model_file = load_model_file(args.model)
    model = build_model(model_file, args.attention)
    made = _default_inputs(model, args) if model_file.example_inputs is None else None
    pairs = model_file.inputs(args.batch, args.seq, args.image_size) if made is None else read_pairs(made[0])
    return Case(model=model, pairs=pairs, loss=model_file.loss)


def load_for_training(args: argparse.Namespace) -> "Case":
    """The model that the arguments name with its values, its inputs and its loss; also in another process.

    Raises:
        AutoshardError: it cannot be built, or has no inputs.
    """
    from autoshard.capture import load_model_file
    from autoshard.capture.inputs import read_pairs
    from autoshard.capture.model_file import user_code
    from autoshard.capture.substitute import as_sdpa, stay_substituted
    from autoshard.runtime.trial import Case

    stay_substituted(args.attention)
    if is_config(args.model):
        model, inputs, _ = _read_config(args, _in_silence)
        return Case(model=type(model)(model.config), pairs=read_pairs(inputs))
    model_file = load_model_file(args.model)
    failed = user_code(model_file.source, model_file.path, "building the model failed")
    with failed, as_sdpa(args.attention):
        model = model_file.build()
    made = _default_inputs(model, args) if model_file.example_inputs is None else None
    pairs = model_file.inputs(args.batch, args.seq, args.image_size) if made is None else read_pairs(made[0])
    return Case(model=model, pairs=pairs, loss=model_file.loss)


def num_param_bytes(args: argparse.Namespace) -> int:
    """Bytes of the parameters of the model that the arguments name; they are not allocated."""
    from autoshard.capture import build_model, load_model_file
    from autoshard.capture.substitute import substituted

    with substituted(args.attention):
        if is_config(args.model):
            model, *_ = _read_config(args, _in_silence, needs_inputs=False)
        else:
            model = build_model(load_model_file(args.model), args.attention)
    return sum(param.numel() * param.element_size() for param in model.parameters())


def is_config(spec: str) -> bool:
    """Whether this is a configuration: a ``config.json``, or a folder that holds one."""
    return spec.endswith(CONFIG_NAME) or (Path(spec) / CONFIG_NAME).is_file()


def _plan_config(args: argparse.Namespace, request: Request, progress: "Progress") -> "PlanResult":
    from autoshard.capture.substitute import ASSUMED, substituted
    from autoshard.pipeline import run_pipeline

    with substituted(args.attention):
        model, inputs, assumed = _read_config(args, progress, needs_inputs=args.frontend != "tree")
        return run_pipeline(
            model,
            inputs,
            loss=None,
            entry=args.entry or "forward",
            request=request,
            frontend=args.frontend,
            outline=args.outline,
            verify=args.verify,
            progress=progress,
            assumed=assumed if args.attention is None else (ASSUMED, *assumed),
        )


def _in_silence(stage: str) -> None:
    """No progress."""


def _read_config(
    args: argparse.Namespace, progress: "Callable[[str], None]", *, needs_inputs: bool = True
) -> "tuple[nn.Module, Any, tuple[str, ...]]":
    """The model on meta, its inputs, and what was assumed."""
    from autoshard.integrations.transformers import build_from_config

    progress(f"building {args.model}")
    built = build_from_config(args.model, trust_remote_code=args.trust_remote_code)
    if not needs_inputs:
        return built.model, None, built.assumed
    inputs, assumed = _made_inputs(built.model, args)
    return built.model, inputs, (*built.assumed, *assumed)


def _default_inputs(model: "nn.Module", args: argparse.Namespace) -> tuple[Any, tuple[str, ...]] | None:
    """Inputs for a model file that gives none, where its model is one of transformers'."""
    if "transformers" not in sys.modules:
        return None
    from autoshard.integrations.transformers import has_config

    return _made_inputs(model, args) if has_config(model) else None


def _made_inputs(model: "nn.Module", args: argparse.Namespace) -> tuple[Any, tuple[str, ...]]:
    """Inputs for a model of transformers in the asked sizes, and what was assumed."""
    from autoshard.integrations.transformers import make_inputs
    from autoshard.pipeline import sized_inputs

    def make(batch: int | None, seq: int | None) -> "MadeInputs":
        return make_inputs(model, args.model, batch=batch, seq=seq, image_size=args.image_size)

    made = make(args.batch, args.seq)
    known = {(args.batch, args.seq): (made.pair,)}
    inputs = sized_inputs(lambda *sizes: known.get(sizes) or (make(*sizes).pair,), args.batch, args.seq)
    return inputs, made.assumed
