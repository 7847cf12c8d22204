"""Plausible inputs of one training step, from the signature of a model's forward and its configuration.

A text is made at once. Where there are images or sounds two things stand nowhere: which of several forms an argument
has, and how many tokens of the text stand for the features of an image. Both are found by trying: the forward is run
on fake tensors, the first form that runs is taken, and the number of features is seen where the model compares it with
the number of its placeholders.
"""

import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.capture.trial import try_forward
from autoshard.errors import ModelLoadError
from autoshard.integrations.transformers.makers import IF_REQUIRED, MAKERS, Form, Wanted
from autoshard.integrations.transformers.sizes import read_sizes

MAX_TRIALS = 24
TEXT_ONLY = {"input_ids", "decoder_input_ids", "labels", "attention_mask", "token_type_ids", "use_cache"}
"""Arguments with one form only: nothing has to be tried."""
INSTEAD = {"pixel_values_videos": "pixel_values"}
"""Arguments that are left out where another one feeds the same modules."""
REMEDY = "write a model file with build_model() and example_inputs() that returns (args, kwargs) of one training step"
CHECK = "get_placeholder_mask"
"""The method in which a transformers model compares its placeholders with the features that replace them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeInputs:
    """Inputs that nobody gave.

    Attributes:
        pair: ``(args, kwargs)`` of one training step.
        assumed: what was assumed, as ``field=value (why)``.
    """

    pair: tuple[tuple[Any, ...], dict[str, Any]]
    assumed: tuple[str, ...]


def has_config(model: nn.Module) -> bool:
    """Whether the model is one of transformers', perhaps inside an adapter, so that inputs can be made for it."""
    return hasattr(getattr(_inner(model), "config", None), "model_type")


def make_inputs(
    model: nn.Module,
    source: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    image_size: int | None = None,
) -> MadeInputs:
    """Inputs of one training step of a transformers model.

    Args:
        model: the model, real or on meta.
        source: names it in errors.
        batch: number of samples, 1 if not given.
        seq: tokens of a text; a moderate number that the model takes if not given.
        image_size: edge of an image in pixels; the configuration's if not given.

    Raises:
        ModelLoadError: an argument cannot be made, or the forward does not run on what was made.
    """
    inner = _inner(model)
    required, optional = _arguments(inner)
    sizes = read_sizes(inner.config, batch, seq, image_size)
    wanted = Wanted(
        config=inner.config, class_name=type(inner).__name__, params=frozenset(required | optional), sizes=sizes
    )
    unknown = sorted(required - MAKERS.keys() - IF_REQUIRED.keys())
    if unknown:
        raise ModelLoadError(source, f"no inputs can be made for {_listed(unknown)} of {wanted.class_name}", REMEDY)
    names = [name for name in (*MAKERS, *IF_REQUIRED) if name in required or _is_wanted(name, optional)]
    kwargs = _fitting(model, wanted, names, source)
    made = ", ".join(kwargs)
    image = {"image_size"} if "pixel_values" in kwargs else set()
    text = {"seq"} if kwargs.keys() & {"input_ids", "decoder_input_ids"} else set()
    told = [f"{name}={why}" for name, why in sizes.assumed.items() if name in {"batch"} | image | text]
    return MadeInputs(pair=((), kwargs), assumed=(f"inputs={made} (made from the forward's arguments)", *told))


def _inner(model: nn.Module) -> Any:
    """The model below an adapter."""
    below: Any = getattr(model, "get_base_model", None)
    return below() if callable(below) else model


def _arguments(model: Any) -> tuple[set[str], set[str]]:
    """Names of the forward's arguments without and with a default."""
    required: set[str] = set()
    optional: set[str] = set()
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            (required if parameter.default is parameter.empty else optional).add(name)
    return required, optional


def _is_wanted(name: str, optional: set[str]) -> bool:
    return name in optional and name in MAKERS and INSTEAD.get(name) not in optional


def _fitting(model: nn.Module, wanted: Wanted, names: list[str], source: str) -> dict[str, Form]:
    """The first forms on which the forward runs."""
    if set(names) <= TEXT_ONLY:
        return _first_forms(wanted, names)
    failures: list[BaseException] = []
    for choice in itertools.islice(_choices(wanted, names), MAX_TRIALS):
        found = _try(model, wanted, choice, failures)
        if found is not None:
            return found
    first = failures[0]
    raise ModelLoadError(
        source,
        f"the inputs that were made ({', '.join(names)}) do not run: {type(first).__name__}: {first}",
        REMEDY,
    ) from first


def _first_forms(wanted: Wanted, names: list[str]) -> dict[str, Form]:
    made = {name: _maker(name)(wanted) for name in names}
    return {name: forms[0] for name, forms in made.items() if forms}


def _choices(wanted: Wanted, names: list[str]) -> Iterator[dict[str, int]]:
    """For each argument the number of its form, those closest to all first forms first."""
    counts = {name: len(_maker(name)(wanted)) for name in names}
    used = [name for name, count in counts.items() if count]
    every = itertools.product(*(range(counts[name]) for name in used))
    for numbers in sorted(every, key=sum):
        yield dict(zip(used, numbers, strict=True))


def _try(
    model: nn.Module, wanted: Wanted, choice: dict[str, int], failures: list[BaseException]
) -> dict[str, Form] | None:
    """The arguments if the forward runs on them, with as many placeholders as it asks for."""
    for _ in range(2 + len(wanted.tokens)):
        kwargs = {name: _maker(name)(wanted)[number] for name, number in choice.items()}
        try:
            with _placeholders(_inner(model), wanted):
                try_forward(model, kwargs)
        except _Asks as asks:
            wanted = replace(wanted, placeholders={**wanted.placeholders, asks.modality: asks.count})
        except Exception as error:  # the forward of any model: what it raises is told if no form runs
            failures.append(error)
            return None
        else:
            return kwargs
    failures.append(RuntimeError("the number of features does not stay the same"))
    return None


def _maker(name: str) -> Any:
    return MAKERS.get(name) or IF_REQUIRED[name]


class _Asks(Exception):
    """The model has another number of features than the text has placeholders."""

    def __init__(self, modality: str, count: int) -> None:
        super().__init__(modality, count)
        self.modality, self.count = modality, count


@contextmanager
def _placeholders(model: Any, wanted: Wanted) -> Iterator[None]:
    """Where a module compares placeholders with features, say how many it wants."""
    watched = [module for module in model.modules() if hasattr(module, CHECK)]
    for module in watched:
        module.__dict__[CHECK] = _watching(getattr(module, CHECK), wanted)
    try:
        yield
    finally:
        for module in watched:
            module.__dict__.pop(CHECK, None)


def _watching(check: Any, wanted: Wanted) -> Any:
    signature = inspect.signature(check)

    def watch(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        embeds = given.get("inputs_embeds")
        for name, features in given.items():
            modality = name.partition("_")[0]
            if (
                not name.endswith("_features")
                or not isinstance(features, torch.Tensor)
                or modality not in wanted.tokens
            ):
                continue
            width = embeds.shape[-1] if embeds is not None else features.shape[-1]
            count = features.numel() // width
            if wanted.placeholders.get(modality) != count:
                raise _Asks(modality, count)
        return check(*args, **kwargs)

    return watch


def _listed(names: list[str]) -> str:
    return ", ".join(names)
