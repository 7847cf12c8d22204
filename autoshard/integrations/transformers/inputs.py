"""Plausible inputs of one training step, from the signature of a model's forward and its configuration.

A text is made at once. Where there are images or sounds two things stand nowhere: which of several forms an argument
has, and how many tokens of the text stand for the features of an image. Both are found by trying: the forward is run
on fake tensors, and the first inputs on which it runs are taken.
"""

import inspect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.capture.trial import try_forward
from autoshard.errors import ModelLoadError
from autoshard.integrations.transformers.makers import IF_NEEDED, MAKERS, Form, Wanted
from autoshard.integrations.transformers.placeholders import Asks, watched
from autoshard.integrations.transformers.sizes import read_sizes

MAX_TRIALS = 12
"""Forms that are tried before something else is changed."""
LARGER = (2, 4)
"""How many times larger an image is tried where its size was not given."""
LARGEST = 1024
"""Pixels of an edge up to which that is tried."""
TEXT_ONLY = {"input_ids", "decoder_input_ids", "labels", "attention_mask", "token_type_ids", "use_cache"}
"""What a text alone is made of: where each of them has one form only, nothing has to be tried."""
ONLY_IF_REQUIRED = {"inputs_embeds", "query_embeds", "hidden_states", "encoder_hidden_states"}
"""Arguments that stand in for others, or for what the model computes itself."""
FEATURES = {
    "pixel_values", "pixel_values_videos", "pixel_values_images", "high_res_pixel_values", "image_grid_thw", "grid_thw",
    "flattened_patches", "mm_token_type_ids", "moe_mm_token_type_ids", "input_features", "input_values",
}  # fmt: skip
"""Images and sounds beside a text, and what tells of them."""
INSTEAD = {"pixel_values_videos": "pixel_values"}
"""Arguments that are left out where another one feeds the same modules."""
REMEDY = "write a model file with build_model() and example_inputs() that returns (args, kwargs) of one training step"
SHOWN = 3
"""Different failures that are told."""


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
    wanted = Wanted(
        config=inner.config,
        class_name=type(inner).__name__,
        params=frozenset(required | optional),
        sizes=read_sizes(inner.config, batch, seq, image_size, _first_widths(inner), _child_widths(inner)),
    )
    if _is_inference_only(inner):
        reason = f"the forward of {wanted.class_name} runs under torch.inference_mode, so it has no training step"
        raise ModelLoadError(source, reason, "plan a model whose forward computes what is trained")
    unknown = sorted(required - MAKERS.keys() - IF_NEEDED.keys())
    if unknown:
        raise ModelLoadError(source, f"no inputs can be made for {', '.join(unknown)} of {wanted.class_name}", REMEDY)
    kwargs, wanted, left_out = _fitting(model, wanted, required, optional, source)
    sized = {"batch"}
    sized |= {"seq"} if kwargs.keys() & {"input_ids", "decoder_input_ids"} else set()
    sized |= {"image_size"} if any(name.startswith("pixel_values") for name in kwargs) else set()
    told = [f"{name}={why}" for name, why in wanted.sizes.assumed.items() if name in sized]
    made = ", ".join(name for name, value in kwargs.items() if value is not False)
    told = [f"inputs={made} (made from the forward's arguments)", *told]
    if left_out:
        told.append(f"left out={', '.join(left_out)} (the forward runs on none of their forms that were tried)")
    return MadeInputs(pair=((), kwargs), assumed=tuple(told))


def _inner(model: nn.Module) -> Any:
    """The model below an adapter."""
    below: Any = getattr(model, "get_base_model", None)
    return below() if callable(below) else model


def _is_inference_only(model: Any) -> bool:
    """Whether the forward is decorated with ``torch.inference_mode``."""
    forward = type(model).forward
    while forward is not None:
        cells = getattr(forward, "__closure__", None) or ()
        found = [cell.cell_contents for cell in cells]
        if any(isinstance(getattr(each, "__self__", None), torch.inference_mode) for each in found):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _arguments(model: Any) -> tuple[set[str], set[str]]:
    """Names of the forward's arguments without and with a default."""
    required: set[str] = set()
    optional: set[str] = set()
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            (required if parameter.default is parameter.empty else optional).add(name)
    return required, optional


def _first_widths(model: nn.Module) -> tuple[int, ...]:
    """What the first layer of the model and the first one of its part for sounds take."""
    found: dict[int, None] = {}
    for part in ("", "audio", "speech"):
        below = (module for name, module in model.named_modules() if part in name)
        found.update(dict.fromkeys(_width(below)))
    return tuple(found) or (80,)


def _child_widths(model: nn.Module) -> tuple[int, ...]:
    """What the first layer of each part of the model takes."""
    return tuple(dict.fromkeys(width for child in model.children() for width in _width(child.modules())))


def _width(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """What the first layer that works on vectors takes; nothing if there is none."""
    for module in modules:
        if isinstance(module, nn.Linear):
            return (module.in_features,)
        if isinstance(module, nn.Conv1d):
            return (module.in_channels,)
    return ()


def _fitting(
    model: nn.Module, wanted: Wanted, required: set[str], optional: set[str], source: str
) -> tuple[dict[str, Form], Wanted, tuple[str, ...]]:
    """The first inputs on which the forward runs, for what they were made, and what had to be left out."""
    first = _names(wanted, required, optional)
    others = IF_NEEDED.keys() & optional - ONLY_IF_REQUIRED
    if set(first) | others <= TEXT_ONLY and all(len(_maker(name)(wanted)) == 1 for name in first):
        return {name: _maker(name)(wanted)[0] for name in first}, wanted, ()
    failures: list[BaseException] = []
    for names, tried in _attempts(wanted, first, required, optional):
        for choice in itertools.islice(_choices(tried, names), MAX_TRIALS):
            found = _try(model, tried, choice, failures)
            if found is not None:
                return found, tried, tuple(name for name in first if name in FEATURES and name not in found)
    told = list(dict.fromkeys(f"{type(failure).__name__}: {failure}" for failure in failures))
    raise ModelLoadError(
        source, f"the inputs that were made ({', '.join(first)}) do not run: {'; '.join(told[:SHOWN])}", REMEDY
    ) from failures[0]


def _names(wanted: Wanted, required: set[str], optional: set[str]) -> list[str]:
    """The arguments to make: all that are required, and the optional ones that have a form here."""
    usual = {name for name in MAKERS if name in optional and INSTEAD.get(name) not in optional}
    return [name for name in (*MAKERS, *IF_NEEDED) if name in required | usual and _maker(name)(wanted)]


def _attempts(
    wanted: Wanted, first: list[str], required: set[str], optional: set[str]
) -> Iterator[tuple[list[str], Wanted]]:
    """What is tried: the usual arguments first.

    Then masks too, an encoder's result, two samples (batch statistics), larger images, no labels; and at last, where a
    text may stand alone, the text alone.
    """
    masks = [name for name in IF_NEEDED if name in optional - ONLY_IF_REQUIRED and _maker(name)(wanted)]
    more = [*first, *(name for name in masks if name not in first)]
    yield first, wanted
    if more != first:
        yield more, wanted
    encoded = [name for name in ("encoder_hidden_states",) if name in optional and _maker(name)(wanted)]
    if encoded:
        yield [*first, *encoded], wanted
    if "batch" in wanted.sizes.assumed:
        two = {**wanted.sizes.assumed, "batch": "2 (it does not run with 1)"}
        doubled = replace(wanted, sizes=replace(wanted.sizes, batch=2, assumed=two))
        yield first, doubled
        yield more, doubled
    if "image_size" in wanted.sizes.assumed and FEATURES & set(first):
        for factor in LARGER:
            height, width = wanted.sizes.height * factor, wanted.sizes.width * factor
            if max(height, width) > LARGEST:
                break
            why = {**wanted.sizes.assumed, "image_size": f"{height}x{width} (it does not run with a smaller one)"}
            yield first, replace(wanted, sizes=replace(wanted.sizes, height=height, width=width, assumed=why))
    if "labels" in first and "labels" not in required:
        yield [name for name in first if name != "labels"], wanted
        yield [name for name in more if name != "labels"], wanted
    if "input_ids" in first and not FEATURES & required and FEATURES & set(first):
        text = [name for name in first if name not in FEATURES]
        yield text, wanted
        yield [*text, *(name for name in masks if name in TEXT_ONLY and name not in text)], wanted


def _choices(wanted: Wanted, names: list[str]) -> Iterator[dict[str, int]]:
    """For each argument the number of its form, those closest to all first forms first."""
    every = itertools.product(*(range(len(_maker(name)(wanted))) for name in names))
    for numbers in sorted(every, key=sum):
        yield dict(zip(names, numbers, strict=True))


def _try(
    model: nn.Module, wanted: Wanted, choice: dict[str, int], failures: list[BaseException]
) -> dict[str, Form] | None:
    """The arguments if the forward runs on them, with as many placeholders as it asks for."""
    for _ in range(2 + len(wanted.tokens)):
        kwargs = {name: _maker(name)(wanted)[number] for name, number in choice.items()}
        try:
            with watched(_inner(model), wanted.placeholders, set(wanted.tokens)):
                try_forward(model, kwargs)
        except Asks as asks:
            wanted = replace(wanted, placeholders={**wanted.placeholders, asks.modality: asks.count})
        except Exception as error:  # the forward of any model: what it raises is told if no form runs
            failures.append(error)
            return None
        else:
            return kwargs
    failures.append(RuntimeError("the number of features does not stay the same"))
    return None


def _maker(name: str) -> Any:
    return MAKERS.get(name) or IF_NEEDED[name]
