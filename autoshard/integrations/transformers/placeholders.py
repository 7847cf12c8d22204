"""How many tokens of a text stand for the features of an image or a sound: seen while the forward runs.

A model replaces the embeddings of its placeholder tokens by features, and needs as many of the one as of the other. The
number depends on the model's towers and poolers and stands in no configuration. Most of transformers' models compare
the two numbers in a method of their own; in the others it is the size of what the method gives that computes features.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

CHECK = "get_placeholder_mask"
FEATURES = {"image": "get_image_features", "audio": "get_audio_features"}


class Asks(Exception):
    """The model has another number of features than the text has placeholders.

    Attributes:
        modality: ``image``, ``audio`` or ``video``.
        count: features of all samples together.
    """

    def __init__(self, modality: str, count: int) -> None:
        super().__init__(modality, count)
        self.modality, self.count = modality, count


@contextmanager
def watched(model: Any, known: Mapping[str, int], modalities: set[str]) -> Iterator[None]:
    """While a forward runs, ``Asks`` is raised where the number of features is not the known one.

    Args:
        model: the root; it is left as it was.
        known: placeholders that the text has, by modality.
        modalities: those that have a token of their own.
    """
    modules = list(model.modules())
    checking = [module for module in modules if callable(getattr(module, CHECK, None))]
    watches = [(module, CHECK, _in_check(getattr(module, CHECK), known, modalities)) for module in checking]
    if not checking:
        watches = [
            (module, name, _in_result(getattr(module, name), modality, known))
            for modality, name in FEATURES.items()
            for module in modules
            if modality in modalities and callable(getattr(module, name, None))
        ]
    for module, name, watch in watches:
        module.__dict__[name] = watch
    try:
        yield
    finally:
        for module, name, _ in watches:
            module.__dict__.pop(name, None)


def _in_check(check: Callable[..., Any], known: Mapping[str, int], modalities: set[str]) -> Callable[..., Any]:
    signature = inspect.signature(check)

    def watch(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        embeds = given.get("inputs_embeds")
        for name, features in given.items():
            modality = name.partition("_")[0]
            if name.endswith("_features") and isinstance(features, torch.Tensor) and modality in modalities:
                width = features.shape[-1] if embeds is None else embeds.shape[-1]
                _require(modality, features.numel() // width, known)
        return check(*args, **kwargs)

    return watch


def _in_result(compute: Callable[..., Any], modality: str, known: Mapping[str, int]) -> Callable[..., Any]:
    def watch(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        features = getattr(result, "pooler_output", result)
        parts = features if isinstance(features, list | tuple) else [features]
        tensors = [part for part in parts if isinstance(part, torch.Tensor) and part.dim() > 1]
        if tensors:
            _require(modality, sum(math.prod(tensor.shape[:-1]) for tensor in tensors), known)
        return result

    return watch


def _require(modality: str, count: int, known: Mapping[str, int]) -> None:
    if known.get(modality) != count:
        raise Asks(modality, count)
