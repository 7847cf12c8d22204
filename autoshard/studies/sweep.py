"""A table over devices, batch and memory: one question for each cell, one capture for each batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from autoshard.errors import InfeasibleBudgetError
from autoshard.pipeline import Answer
from autoshard.request import Request
from autoshard.studies.subject import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One question and its answer.

    Attributes:
        devices: number of devices.
        batch: of one device, ``None`` for what the inputs have by themselves.
        seq: sequence length, likewise.
        allowed_bytes: what tensors may occupy on one device.
        answer: the plan; ``None`` if none fits.
        error: why none fits.
    """

    devices: int
    batch: int | None
    seq: int | None
    allowed_bytes: int
    answer: Answer | None
    error: InfeasibleBudgetError | None


def sweep(
    subject: Subject,
    request: Request,
    devices: Sequence[int | None] = (None,),
    batches: Sequence[int | None] = (None,),
    memories: Sequence[int | str | None] = (None,),
    seq: int | None = None,
) -> Iterator[Cell]:
    """The cells of the grid, batch by batch; what is not given is that of the request.

    Raises:
        AutoshardError: whatever ``Subject.ask`` raises, but that a plan does not fit.
    """
    for batch, number, memory in product(batches, devices, memories):
        asked = replace(
            request,
            devices=request.devices if number is None else number,
            memory=request.memory if memory is None else memory,
        )
        question = subject.question(asked)
        found: Answer | None = None
        why: InfeasibleBudgetError | None = None
        try:
            found = subject.ask(asked, batch, seq)
        except InfeasibleBudgetError as error:
            why = error
        yield Cell(
            devices=question.num_devices,
            batch=batch,
            seq=seq,
            allowed_bytes=question.allowed_bytes,
            answer=found,
            error=why,
        )
