"""Non-persistent buffers of a model on meta: computed again, or guarded until something fills them.

A buffer that a constructor computes (rotary frequencies, masks) and that no state dict holds is lost on meta:
``to_empty`` gives it memory with whatever stood there. Two things are done about it:

* *Rebuilt*: a module whose constructor arguments can all be read from attributes of the same names is constructed once
  more, its parameters on meta and its buffers real. Only if the twin has the same structure and the same plain
  attributes, and a second twin the same values, are its values taken; ``to_empty`` then fills them in.
* *Guarded*: any other is filled with a value that no model uses, and the first forward that finds it still there stops
  with the buffer's name. Whoever computes the buffer in between is not disturbed.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.capture.build import parameters_on_meta
from autoshard.errors import ApplyError

_LEFT_OUT = ("device", "dtype")
"""Constructor arguments that say where and how to make tensors; the twin takes the defaults and is then compared."""

_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A buffer on meta that no state dict holds.

    Attributes:
        name: its FQN.
        module: the module that holds it.
        key: its name there.
        value: what the constructor computes, ``None`` if that is not known.
    """

    name: str
    module: nn.Module
    key: str
    value: torch.Tensor | None


def lost_buffers(model: nn.Module, rebuilt: Collection[str]) -> tuple[Lost, ...]:
    """The buffers on meta that no state dict holds.

    Args:
        model: not sharded yet: FSDP2 changes the classes of modules.
        rebuilt: FQNs of those whose values are wanted; they are known where the constructor tells.
    """
    found = []
    for fqn, module in model.named_modules():
        keys = [key for key in _non_persistent(module) if module._buffers[key].is_meta]
        if not keys:
            continue
        names = {key: f"{fqn}.{key}" if fqn else key for key in keys}
        values = _values(module, [key for key in keys if names[key] in rebuilt])
        found += [Lost(name=names[key], module=module, key=key, value=values.get(key)) for key in keys]
    return tuple(found)


def warn_of_lost(lost: Sequence[Lost]) -> None:
    """Say once, on the first rank, which buffers somebody else has to fill."""
    names = [each.name for each in lost if each.value is None]
    if names and dist.get_rank() == 0:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        warnings.warn(
            f"this model is on meta and has buffers that no state dict holds and that cannot be rebuilt: "
            f"{', '.join(names[:4])}{more}; compute them after to_empty(), or the first forward will stop",
            UserWarning,
            stacklevel=3,
        )


def fill_after_to_empty(model: nn.Module, lost: Sequence[Lost]) -> None:
    """Make the model's ``to_empty`` fill the buffers whose values are known, and mark the others."""
    if not lost:
        return
    original = model.to_empty

    def to_empty(*args: Any, **kwargs: Any) -> nn.Module:
        original(*args, **kwargs)
        with torch.no_grad():
            for each in lost:
                buffer = each.module._buffers[each.key]
                if buffer is None or buffer.is_meta:
                    continue
                if each.value is None:
                    buffer.fill_(_mark(buffer.dtype))
                else:
                    buffer.copy_(each.value)
        return model

    model.to_empty = to_empty  # type: ignore[method-assign]


def require_filled(lost: Sequence[Lost]) -> Callable[[], None]:
    """A function for the first forward: it stops if a marked buffer still holds its mark.

    Raises (when called):
        ApplyError: names every such buffer.
    """
    waiting = [each for each in lost if each.value is None]

    def before() -> None:
        unfilled = []
        for each in waiting:
            buffer = each.module._buffers[each.key]
            if buffer is not None and not buffer.is_meta and buffer.numel() and _is_marked(buffer):
                unfilled.append(each.name)
        if unfilled:
            raise ApplyError(
                tuple(unfilled),
                "buffers",
                "after to_empty() nothing has computed these buffers, which no state dict holds; compute them before "
                "the first forward",
            )
        waiting.clear()

    return before


def _non_persistent(module: nn.Module) -> list[str]:
    return [
        key
        for key, buffer in module._buffers.items()
        if buffer is not None and key in module._non_persistent_buffers_set
    ]


def _mark(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return torch.iinfo(dtype).max


def _is_marked(buffer: torch.Tensor) -> bool:
    if buffer.dtype == torch.bool:
        return bool(buffer.all())
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return bool(buffer.isnan().all())
    return bool((buffer == _mark(buffer.dtype)).all())


def _values(module: nn.Module, keys: list[str]) -> dict[str, torch.Tensor]:
    """Values of a module's buffers from two equal twins; empty if there is any doubt."""
    arguments = _arguments(module) if keys else None
    if arguments is None:
        return {}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), parameters_on_meta():
            first, second = type(module)(**arguments), type(module)(**arguments)
    except Exception:  # the user's constructor, with arguments that were only read off
        return {}
    if _structure(first) != _structure(module):
        return {}
    values = {}
    for key in keys:
        value, again = first._buffers[key], second._buffers[key]
        if value is None or again is None or value.is_meta or not torch.equal(value, again):
            return {}
        values[key] = value.detach().clone()
    return values


def _arguments(module: nn.Module) -> dict[str, Any] | None:
    """The constructor's arguments as far as attributes of the same names tell; ``None`` if one is not told."""
    arguments: dict[str, Any] = {}
    try:
        signature = inspect.signature(type(module).__init__)
    except (TypeError, ValueError):
        return None
    for name, parameter in list(signature.parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            return None
        if name in vars(module):
            arguments[name] = vars(module)[name]
        elif name not in _LEFT_OUT or parameter.default is parameter.empty:
            return None
    return arguments


def _structure(module: nn.Module) -> list[object]:
    """What a twin must share: modules, parameters and buffers with shapes and dtypes, plain attributes."""
    found: list[object] = []
    for fqn, each in module.named_modules(remove_duplicate=False):
        attributes = sorted((key, value) for key, value in vars(each).items() if isinstance(value, _PLAIN))
        tensors = [(key, tuple(p.shape), p.dtype) for key, p in each.named_parameters(recurse=False)]
        tensors += [(key, tuple(b.shape), b.dtype) for key, b in each.named_buffers(recurse=False)]
        found.append((fqn, type(each), repr(attributes), tensors, sorted(_non_persistent(each))))
    return found
