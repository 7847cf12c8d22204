"""Build a model without its memory: on the meta device, or at least with its parameters there.

Some constructors compute with tensors (a ``linspace(...).tolist()`` for the depths of stages) and fail on meta. Then
the model is built for real, each parameter moving to meta as soon as it is registered, so that never more than one is
in memory; buffers stay real.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from autoshard.capture.model_file import ModelFile, user_code
from autoshard.errors import ModelLoadError

FACTORY_REMEDY = "let the factory return the torch.nn.Module that is trained"


def build_model(model_file: ModelFile) -> nn.Module:
    """The model of a model file, its parameters on the meta device where its constructor allows.

    A file that holds a finished ``model`` hands out that one, as it is.

    Raises:
        ModelLoadError: the factory fails both ways, or returns something else.
    """
    try:
        with torch.device("meta"):
            model = model_file.build()
    except Exception:  # the user's code; what it raises is asked for again below, where values are real
        with user_code(model_file.source, model_file.path, "building the model failed"), parameters_on_meta():
            model = model_file.build()
    except SystemExit as error:
        with user_code(model_file.source, model_file.path, "building the model failed"):
            raise error
    if not isinstance(model, nn.Module):
        raise ModelLoadError(
            model_file.source, f"the factory returned a {type(model).__name__}, not a torch.nn.Module", FACTORY_REMEDY
        )
    return model


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
