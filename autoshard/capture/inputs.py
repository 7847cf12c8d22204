"""Example inputs: from what the user gives to pairs of arguments, and from those to fake tensors.

A pair is ``(args, kwargs)``. The user gives one pair, a list of pairs where the model takes different paths, or a
function that returns either; the function may take ``batch`` and ``seq``.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.capture.answers import Origin
from autoshard.capture.containers import map_tensors, named_tensors
from autoshard.capture.fake import fake_tensor
from autoshard.capture.tree import dtype_name
from autoshard.capture.values import Values, may_keep
from autoshard.errors import RequestError
from autoshard.ir import InputInfo

Pair: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

EXPECTED = "(args, kwargs) with a tuple and a dict, such as (ids,), {}, or a list of such pairs"


def read_pairs(
    inputs: Any, batch: int | None = None, seq: int | None = None, image_size: int | None = None
) -> tuple[Pair, ...]:
    """The pairs that ``inputs`` stands for.

    Args:
        inputs: a pair, a list of pairs, or a function that returns either.
        batch: batch size to ask the function for.
        seq: sequence length to ask the function for.
        image_size: edge of an image to ask the function for, in pixels.

    Raises:
        RequestError: it is none of these, or it cannot be asked for a batch size or sequence length.
    """
    sizes = {"batch": batch, "seq": seq, "image_size": image_size}
    asked = {name: value for name, value in sizes.items() if value is not None}
    if callable(inputs):
        inputs = inputs(**_accepted(inputs, asked))
    elif asked:
        raise RequestError(
            " and ".join(asked),
            ", ".join(map(str, asked.values())),
            "no size, since the inputs are fixed",
            "give a function of batch and seq that returns the inputs",
        )
    if _is_pair(inputs):
        return ((tuple(inputs[0]), dict(inputs[1])),)
    if isinstance(inputs, list | tuple) and inputs and all(_is_pair(pair) for pair in inputs):
        return tuple((tuple(args), dict(kwargs)) for args, kwargs in inputs)
    raise RequestError("inputs", _describe(inputs), EXPECTED, "return them in this form")


def input_infos(pair: Pair) -> tuple[InputInfo, ...]:
    """The tensors of a pair as the IR lists them; one that is passed twice is listed twice and knows its first name."""
    first: dict[int, str] = {}
    infos = []
    for name, tensor in _tensors(pair):
        same_as = first.setdefault(id(tensor), name)
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        infos.append(InputInfo(name=name, shape=shape, dtype=dtype, same_as=same_as if same_as != name else ""))
    return tuple(infos)


def fake_pair(
    pair: Pair, mode: FakeTensorMode, values: Values, dtype: torch.dtype | None
) -> tuple[Pair, list[torch.Tensor]]:
    """The pair with fake tensors, and the fake tensors; small integer tensors keep a copy of their value."""
    twins: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        twin = twins.get(id(tensor))
        if twin is None:
            twin = twins[id(tensor)] = fake_tensor(mode, tensor, dtype)
            if tensor.requires_grad:
                twin.requires_grad_()
            if may_keep(tensor) and tensor.device.type == "cpu":
                values.set(twin, tensor.detach().clone(), Origin.INPUTS)
        return twin

    args, kwargs = map_tensors(pair, fake)
    return (args, kwargs), list(twins.values())


def _accepted(function: Callable[..., Any], asked: dict[str, int]) -> dict[str, int]:
    """``asked``, if the function takes it."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return asked
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    refused = [name for name in asked if name not in parameters and not takes_any]
    if refused:
        wanted = ", ".join(f"{field}=None" for field in dict.fromkeys(("batch", "seq", *refused)))
        name = getattr(function, "__name__", "the function")
        raise RequestError(
            " and ".join(refused),
            ", ".join(str(asked[field]) for field in refused),
            f"nothing, since {name}() has no such parameter",
            f"write it as {name}({wanted})",
        )
    return asked


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) == 2
        and isinstance(value[0], tuple | list)
        and isinstance(value[1], dict)
        and not hasattr(value, "_fields")
    )


def _tensors(pair: Pair) -> Iterator[tuple[str, torch.Tensor]]:
    for position, value in enumerate(pair[0]):
        yield from named_tensors(value, str(position))
    for keyword, value in pair[1].items():
        yield from named_tensors(value, keyword)


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of ({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__
