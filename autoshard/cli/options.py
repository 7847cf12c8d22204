"""The options that make a ``Request``: the same names as its fields, none of them with a default of its own."""

import argparse
import dataclasses
from typing import Any

from autoshard.request import COMPILE, OPTIMIZERS, PRECISIONS, Request


def add_request_options(parser: argparse.ArgumentParser, *, grid: bool = False) -> None:
    """Add an option for each field of ``Request``.

    Args:
        parser: of the command.
        grid: the command has options of its own for several numbers of devices and several allowances.
    """
    group = parser.add_argument_group("what is asked (what is not given is assumed, and the output names it)")
    group.add_argument(
        "--device",
        help="a device profile such as h100-80gb, a100-80gb or cpu, or a profile's .json file",
    )
    if not grid:
        group.add_argument("--devices", type=int, metavar="N", help="number of devices")
        group.add_argument("--memory", metavar="SIZE", help="what tensors may occupy on one device, such as 60GiB")
    group.add_argument("--precision", choices=tuple(PRECISIONS), help="bf16 computes in bf16 and reduces in fp32")
    group.add_argument("--optimizer", choices=OPTIMIZERS, help="whose state has to fit as well (default: adamw)")
    group.add_argument(
        "--recompute", choices=("auto", "none", "full"), help="which blocks compute their activations again in backward"
    )
    group.add_argument("--mesh", help="auto, the number of devices, or REPLICATExSHARD such as 2x4")
    group.add_argument(
        "--reshard", choices=("auto", "always", "never"), help="free unsharded parameters between forward and backward"
    )
    group.add_argument(
        "--compile", choices=COMPILE, help="blocks: torch.compile on each repeated block, before it is sharded"
    )
    group.add_argument("--objective", choices=("time", "memory"), help="what is to be least among the plans that fit")
    group.add_argument(
        "--root-percent",
        type=int,
        metavar="N",
        help="the most of the parameters that the root unit may own, if possible",
    )
    group.add_argument(
        "--micro-batches", type=positive, metavar="N", help="forwards and backwards before one step of the optimizer"
    )
    group.add_argument(
        "--gradient-sync", choices=("every", "last"), help="reduce gradients in every micro-batch, or in the last alone"
    )
    group.add_argument(
        "--zero-grad", choices=("none", "zeros"), help="what zero_grad leaves (zeros: set_to_none=False)"
    )
    group.add_argument("--clip", action="store_true", default=None, help="gradients are clipped before the step")
    group.add_argument(
        "--method",
        dest="methods",
        action="append",
        metavar="FQN:NAME",
        help="a method other than forward that runs a module, such as codec:encode; may be given again",
    )


def add_subject_arguments(parser: argparse.ArgumentParser, *, sizes: bool = True) -> None:
    """Add the model that a command asks about, and what there is to say of its step.

    Args:
        parser: of the command.
        sizes: the command takes one batch size and one sequence length.
    """
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="model.py, model.py:factory, package.module:factory, or a transformers config.json or its folder",
    )
    step = parser.add_argument_group("the training step")
    if sizes:
        step.add_argument("--batch", type=positive, metavar="N", help="batch size of the inputs")
        step.add_argument("--seq", type=positive, metavar="N", help="sequence length of the inputs")
    step.add_argument("--image-size", type=positive, metavar="N", help="edge of the images in the inputs, in pixels")
    step.add_argument("--entry", metavar="NAME", help="method that runs the step (default: forward)")
    step.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that lies beside a config.json"
    )


def add_attention_option(parser: "argparse._ActionsContainer") -> None:
    """Add ``--attention``, which is about the model and not about the plan."""
    parser.add_argument(
        "--attention",
        choices=("sdpa",),
        help="exchange flash_attn, which runs on a GPU only, for torch's own call, which keeps the same tensors",
    )


def read_request(args: argparse.Namespace) -> Request:
    """The request that the options make; fields that were not given keep their default."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(Request):
        value = getattr(args, field.name, None)
        if value is not None:
            given[field.name] = tuple(value) if field.name == "methods" else value
    return Request(**given)


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value
