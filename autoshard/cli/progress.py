"""Tells on stderr what a run is doing, once it takes longer than a person likes to wait without a word."""

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from types import TracebackType

DELAY_S = 1.0


class Timings:
    """Where the time of a command goes: seconds of the clock and of the processor by stage, the start included."""

    def __init__(self) -> None:
        used = time.process_time()
        self._stages: list[tuple[str, float, float]] = [("starting", time.perf_counter() - used, 0.0)]

    def begin(self, stage: str) -> None:
        """A stage begins, and the one before it has ended."""
        self._stages.append((stage, time.perf_counter(), time.process_time()))

    def rows(self) -> list[tuple[str, str, str]]:
        """Stage, seconds of the clock, seconds of the processor; the sum comes last. The last stage ends now."""
        begun = [*self._stages, ("", time.perf_counter(), time.process_time())]
        rows = [
            (stage, f"{following[1] - at:.2f}", f"{following[2] - used:.2f}")
            for (stage, at, used), following in pairwise(begun)
        ]
        return [*rows, ("all", f"{begun[-1][1] - begun[0][1]:.2f}", f"{begun[-1][2]:.2f}")]


class Progress:
    """Callable with the name of each stage as it begins; silent in the first second.

    Attributes:
        timings: where the time went.

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
        self.timings = Timings()

    def __call__(self, stage: str) -> None:
        """Tell that a stage begins."""
        self.timings.begin(stage)
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
