"""The machine while a step runs on fake tensors: nothing random, nothing collected, nothing said."""

import gc
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")

SEED = 0
"""Random choices that the model makes in Python are the same in every trace."""


@contextmanager
def quiet_machine(seed: int = SEED) -> Iterator[None]:
    """Random states as before, no garbage collection at moments that nobody chose, and no words of torch's own.

    torch logs the traceback of each op that fails on fake tensors; what failed is told by ``CaptureError``.
    """
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
        numpy.random.seed(seed)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    was_enabled = gc.isenabled()
    gc.disable()
    was_disabled, _TORCH_LOG.disabled = _TORCH_LOG.disabled, True
    try:
        yield
    finally:
        for restore, state in states:
            restore(state)
        _TORCH_LOG.disabled = was_disabled
        if was_enabled:
            gc.enable()
