"""What just fits: bisection over questions, so that each answer is a plan and its neighbour has none.

It is taken for granted that more devices, a smaller batch, a shorter sequence or more memory never hurt; where that
does not hold (padding can outgrow a shard), the answer still has a plan, and its neighbour still has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autoshard.errors import InfeasibleBudgetError
from autoshard.pipeline import Answer
from autoshard.request import Request
from autoshard.studies.subject import Subject

MAX_DEVICES = 4096
MAX_SIZE = 2**20
"""Batch sizes and sequence lengths beyond are not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The last value that has a plan.

    Attributes:
        what: ``devices``, ``batch``, ``seq`` or ``memory``.
        value: that value, ``None`` if none has a plan.
        answer: the plan for it.
        beyond: the next value, which has none; ``None`` if there is no next one.
        error: why it has none.
    """

    what: str
    value: int | None
    answer: Answer | None
    beyond: int | None
    error: InfeasibleBudgetError | None


def device_counts(per_node: int, most: int = MAX_DEVICES) -> tuple[int, ...]:
    """Numbers of devices that people rent: powers of two within a node, then whole nodes."""
    inside = [2**power for power in range(per_node.bit_length()) if 2**power < per_node]
    counts = [*inside, *range(per_node, most + 1, per_node)]
    return tuple(count for count in counts if count <= most)


def fewest_devices(
    subject: Subject, request: Request, batch: int | None = None, seq: int | None = None, most: int = MAX_DEVICES
) -> Fitted:
    """The fewest devices that have a plan, among those of ``device_counts``; inputs are those of one device.

    The mesh of the request is one axis here, whatever it says.
    """
    profile = subject.question(replace(request, devices=1, mesh="auto")).profile

    def ask(devices: int) -> Answer:
        subject.progress(f"asking for {devices} devices")
        return subject.ask(replace(request, devices=devices, mesh="auto"), batch, seq)

    return _last_that_fits("devices", device_counts(profile.devices_per_node, most)[::-1], ask)


def largest_size(
    subject: Subject,
    request: Request,
    what: Literal["batch", "seq"],
    batch: int | None = None,
    seq: int | None = None,
    step: int = 1,
    most: int = MAX_SIZE,
) -> Fitted:
    """The largest batch of a device, or the longest sequence, that has a plan.

    Args:
        subject: the model.
        request: what is asked.
        what: ``batch`` or ``seq``.
        batch: size of the batch while sequences grow.
        seq: length of the sequences while the batch grows.
        step: only multiples of it are asked for.
        most: no more than this is asked for.
    """
    known: dict[int, Answer | InfeasibleBudgetError] = {}

    def ask(size: int) -> Answer:
        if size not in known:
            subject.progress(f"asking for {what} {size}")
            sizes = (size, seq) if what == "batch" else (batch, size)
            try:
                known[size] = subject.ask(request, *sizes)
            except InfeasibleBudgetError as error:
                known[size] = error
        found = known[size]
        if isinstance(found, InfeasibleBudgetError):
            raise found
        return found

    # Doubling first: a batch of a million would have to be captured before one of two is known to be too large.
    values, size = [step], step
    while size <= most // 2 and not isinstance(_try(ask, size), InfeasibleBudgetError):
        size *= 2
        values.append(size)
    low = 0 if len(values) == 1 else values[-2]
    return _last_that_fits(what, range(max(step, low), min(size, most) + 1, step), ask)


def least_memory(subject: Subject, request: Request, batch: int | None = None, seq: int | None = None) -> Fitted:
    """The least memory of a device that has a plan, to the byte; the request's own is not looked at."""
    subject.progress("asking for the least memory")
    request = replace(request, memory=None, objective="memory")
    first = _try(lambda size: subject.ask(request, batch, seq), 0)
    if isinstance(first, InfeasibleBudgetError):
        return Fitted(what="memory", value=None, answer=None, beyond=first.allowed_bytes, error=first)
    best, low, error = first, 0, None
    high = best.found.timeline.peak_bytes
    while high - low > 1:
        # Just below the least peak so far, and halfway where that was not the least.
        middle = high - 1 if error is None else (low + high) // 2
        found = _try(lambda size: subject.ask(replace(request, memory=size), batch, seq), middle)
        if isinstance(found, InfeasibleBudgetError):
            error = found
            low = max(middle, min(found.smallest_bytes, high) - 1)
        else:
            best, high = found, found.found.timeline.peak_bytes
    return Fitted(what="memory", value=high, answer=best, beyond=high - 1, error=error)


def _last_that_fits(what: str, values: Sequence[int], ask: Callable[[int], Answer]) -> Fitted:
    """Bisection: values stand from the easiest to the hardest."""
    low, high = -1, len(values)
    answer, error = None, None
    while high - low > 1:
        middle = (low + high) // 2
        found = _try(ask, values[middle])
        if isinstance(found, InfeasibleBudgetError):
            high, error = middle, found
        else:
            low, answer = middle, found
    return Fitted(
        what=what,
        value=values[low] if low >= 0 else None,
        answer=answer,
        beyond=values[high] if high < len(values) else None,
        error=error,
    )


def _try(ask: Callable[[int], Answer], value: int) -> Answer | InfeasibleBudgetError:
    try:
        return ask(value)
    except InfeasibleBudgetError as error:
        return error
