"""Tells on stderr what a run is doing, once it takes longer than a person likes to wait without a word."""

import threading
from collections.abc import Callable
from types import TracebackType

DELAY_S = 1.0


class Progress:
    """Callable with the name of each stage as it begins; silent in the first second.

    Args:
        write: takes one line.
        delay_s: seconds of silence, ``DELAY_S`` if not given.
    """

    def __init__(self, write: Callable[[str], None], delay_s: float | None = None) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._is_late = False
        self._latest = ""
        self._timer = threading.Timer(DELAY_S if delay_s is None else delay_s, self._wake)
        self._timer.daemon = True

    def __call__(self, stage: str) -> None:
        """Tell that a stage begins."""
        with self._lock:
            self._latest = stage
            if self._is_late:
                self._write(stage)

    def __enter__(self) -> "Progress":
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _wake(self) -> None:
        with self._lock:
            self._is_late = True
            if self._latest:
                self._write(self._latest)
