"""Build a model without its memory: on the meta device, or at least with its parameters there.

Small integer tensors keep their values, since models compute sizes from them (strides and paddings held as buffers).
Where a constructor does not run that way everything is on meta. Some constructors compute with floating point tensors
(a ``linspace(...).tolist()`` for the depths of stages) and fail on meta too. Then the model is built for real, each
parameter moving to meta as soon as it is registered, so that never more than one is in memory; buffers stay real.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autoshard.capture.model_file import ModelFile, user_code
from autoshard.capture.substitute import as_sdpa
from autoshard.capture.values import MAX_INT_NUMEL
from autoshard.errors import ModelLoadError

Made = TypeVar("Made")

FACTORY_REMEDY = "let the factory return the torch.nn.Module that is trained"


def build_model(model_file: ModelFile, attention: str | None = None) -> nn.Module:
    """The model of a model file, its parameters on the meta device where its constructor allows.

    A file that holds a finished ``model`` hands out that one, as it is.

    Args:
        model_file: what the file offers.
        attention: ``sdpa`` if transformers' models are to take it where they ask for flash_attn.

    Raises:
        ModelLoadError: the factory fails both ways, or returns something else.
    """
    try:
        with as_sdpa(attention):
            model = on_meta(model_file.build)
    except Exception:  # the user's code; what it raises is asked for again below, where values are real
        failed = user_code(model_file.source, model_file.path, "building the model failed")
        with failed, as_sdpa(attention), parameters_on_meta():
            model = model_file.build()
    except SystemExit as error:
        with user_code(model_file.source, model_file.path, "building the model failed"):
            raise error
    if not isinstance(model, nn.Module):
        raise ModelLoadError(
            model_file.source, f"the factory returned a {type(model).__name__}, not a torch.nn.Module", FACTORY_REMEDY
        )
    return model


def on_meta(make: Callable[[], Made]) -> Made:
    """What a constructor makes under the meta device, small integer tensors with their values where it runs that way.

    Args:
        make: the constructor; it is called again if it fails.

    Raises:
        Exception: whatever it raises where all tensors are on meta.
    """
    try:
        with torch.device("meta"), parameters_on_meta(), _IntegersWithValues():
            return make()
    except Exception:  # any constructor; what it raises is asked for again
        with torch.device("meta"):
            return make()


class _IntegersWithValues(TorchFunctionMode):
    """Below the meta device, makes small integer tensors on the cpu; whatever meets a meta tensor becomes one."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        are_mixed = len({tensor.is_meta for tensor in tensors}) > 1
        if are_mixed and not _is_in_place(func):
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        result = func(*args, **kwargs)
        is_new = not tensors and kwargs.get("device") is None and isinstance(result, torch.Tensor) and result.is_meta
        if not is_new or result.is_floating_point() or result.is_complex() or result.numel() > MAX_INT_NUMEL:
            return result
        return func(*args, **{**kwargs, "device": "cpu"})


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters move to the meta device when they are registered; ties stay ties."""
    original = nn.Module.register_parameter
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        found = module._parameters.get(name)
        if found is None or found.device.type == "meta" or isinstance(found, _LAZY):
            return
        if id(found) not in moved:  # the original is kept too, so that its id is not used again
            twin = _twin(found)
            moved[id(found)] = (found, twin)
        module._parameters[name] = moved[id(found)][1]

    with mock.patch.object(nn.Module, "register_parameter", register):
        yield


_LAZY = (nn.parameter.UninitializedParameter,)


def _twin(param: nn.Parameter) -> nn.Parameter:
    extra: dict[str, Any] = dict(param.__dict__)
    twin = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    twin.__dict__.update(extra)
    return twin
