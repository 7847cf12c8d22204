"""What was made of the last few graphs, so that it is made once although every stage asks for it.

Graphs are told apart by identity: they never change, and comparing what is in them takes as long as most of what is
made of them.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Recent(Generic[Made]):
    """The values that were made last, by the object that they were made of and by a key beside it.

    Args:
        most: values that are kept.
    """

    def __init__(self, most: int) -> None:
        self._kept: deque[tuple[object, object, Made]] = deque(maxlen=most)

    def get(self, source: object, key: object, make: Callable[[], Made]) -> Made:
        """The value that is kept for this very object and an equal key, else a new one."""
        for known, kept_key, made in self._kept:
            if known is source and kept_key == key:
                return made
        new = make()
        self._kept.append((source, key, new))
        return new
