"""What a block changes beside making its result: its own attributes, and the state of Python's random numbers.

Tensors that it leaves behind elsewhere are found by their memory, which is still alive when the block is done.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autoshard.capture.outline.pairing import own_tensors, submodules
from autoshard.capture.refusals import NotReplayable
from autoshard.capture.values import Values


@contextmanager
def unchanged(module: nn.Module, known: Values) -> Iterator[None]:
    """The block and the random state are as they were afterwards, or the block is not replayed."""
    tensors = own_tensors(module)
    values = [(tensor, known.known(tensor)) for tensor in tensors]
    with _disable_current_modes():
        kept = [(tensor, value[0].clone(), value[1]) for tensor, value in values if value is not None]
    before, states = _picture(module), _random_states()
    try:
        yield
        if _picture(module) != before:
            raise NotReplayable("its forward changes its own attributes")
        if _random_states() != states:
            raise NotReplayable("its forward draws random numbers outside torch")
    finally:
        for tensor, value, origin in kept:
            known.set(tensor, value, origin)


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else ()
    return random.getstate(), tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in drawn)


def _picture(module: nn.Module) -> list[Any]:
    """Identities of everything that a block holds, and of what is in its containers."""
    return [{name: _identity(value) for name, value in vars(part).items()} for part in submodules(module)]


def _identity(value: Any) -> Any:
    if isinstance(value, dict):
        return id(value), [(key, id(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return id(value), [id(part) for part in value]
    return id(value) if not isinstance(value, set) else (id(value), len(value))
