"""How often a command looks for garbage: planning makes millions of values that live on, and hardly a cycle."""

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

THRESHOLDS = (200_000, 20, 100)
"""Values made before the youngest generation is looked through, and how often before the next is.

Python's own 700 make the import of torch and a model's library slower by a third.
"""


def seldom_collected(command: Callable[P, R]) -> Callable[P, R]:
    """The command, with garbage collected seldom while it runs; not for commands that train on real tensors."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = gc.get_threshold()
        gc.set_threshold(*THRESHOLDS)
        try:
            return command(*args, **kwargs)
        finally:
            gc.set_threshold(*before)

    return run
