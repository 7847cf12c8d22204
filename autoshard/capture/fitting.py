"""Sizes that follow from data which nobody knows, made to fit where an op would refuse them.

Where a number or a mask depends on activations it is assumed, each by itself: a number is 1, a mask selects every
element. What the model does next may tell better. A tensor that is split by such numbers is split into equal parts, and
of a selection that is reshaped there are as many elements as the new shape has. Only calls that fail otherwise are
changed, and only after something was assumed: a model that is wrong by itself fails as it does in training.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.capture.values import Values

SPLITS: set[Any] = {torch.split, torch.Tensor.split, torch.split_with_sizes, torch.Tensor.split_with_sizes}
RESHAPES: set[Any] = {torch.reshape, torch.Tensor.reshape, torch.Tensor.view}


def fitted(func: Any, args: tuple, kwargs: dict[str, Any], values: Values) -> tuple[tuple, dict[str, Any]]:
    """The arguments with sizes that fit.

    Args:
        func: any function of torch.
        args: its arguments.
        kwargs: its arguments by name.
        values: knows whether something was assumed before.
    """
    if not values.assumed or not args or not isinstance(args[0], torch.Tensor):
        return args, kwargs
    if func in SPLITS:
        return _split(args, kwargs, values)
    if func in RESHAPES:
        return _reshaped(args, kwargs, values), kwargs
    return args, kwargs


def _split(args: tuple, kwargs: dict[str, Any], values: Values) -> tuple[tuple, dict[str, Any]]:
    names = ("split_size_or_sections", "split_size", "split_sizes")
    given = next((kwargs[name] for name in names if name in kwargs), args[1] if len(args) > 1 else None)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if not isinstance(given, list | tuple) or not all(isinstance(size, int) for size in given) or not given:
        return args, kwargs
    length = args[0].shape[dim]
    if sum(given) == length:
        return args, kwargs
    values.note("split", f"{len(given)} sizes that depend on activations are equal parts of {length}")
    least, more = divmod(length, len(given))
    sizes = [least + (place < more) for place in range(len(given))]
    return (args[0], sizes, dim), {}


def _reshaped(args: tuple, kwargs: dict[str, Any], values: Values) -> tuple:
    shape: Sequence[Any] = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if not shape or kwargs or not all(isinstance(size, int) and size >= 0 for size in shape):
        return args
    count, wanted = args[0].numel(), math.prod(shape)
    if args[0].dim() != 1 or wanted >= count:  # a selection by a mask is flat, and assumed to be as long as can be
        return args
    values.note("reshape", f"{wanted} of {count} elements were selected")
    return (args[0][:wanted], *args[1:])
