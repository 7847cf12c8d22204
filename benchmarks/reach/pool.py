"""Many small jobs, each in a forked process with its own limits of time and memory.

The parent has imported the large libraries, so that a job starts in milliseconds; a job that crashes, hangs or eats the
memory is a result like any other. One thread starts and reaps them all: nothing is forked beside a running thread.
"""

import faulthandler
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

Job = TypeVar("Job")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Running:
    """A job under way: its process, when it began, and when it must have ended."""

    job: Any
    process: ForkProcess
    start: float
    limit: float


def run_all(
    jobs: Sequence[Job],
    work: Callable[[Job], Row],
    lost: Callable[[Job, str], Row],
    *,
    at_a_time: int,
    limit_s: Callable[[Job], float],
    limit_bytes: int,
) -> Iterator[Row]:
    """The row of each job as it ends, with the seconds that it took.

    Args:
        jobs: what is to be done, in the order of starting.
        work: makes the row; runs in a process of its own.
        lost: makes the row of a job that gave none, from the reason.
        at_a_time: processes at a time.
        limit_s: seconds after which a job is ended.
        limit_bytes: memory that one job may take.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(jobs))
    running: dict[Connection, Running] = {}
    while waiting or running:
        while waiting and len(running) < at_a_time:
            job = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(work, job, sender, limit_bytes))
            process.start()
            sender.close()
            now = time.monotonic()
            running[receiver] = Running(job, process, now, now + limit_s(job))
        patience = max(min(each.limit for each in running.values()) - time.monotonic(), 0.0)
        ready = wait(list(running), timeout=patience)
        late = [end for end, each in running.items() if end not in ready and time.monotonic() >= each.limit]
        for end in (*ready, *late):
            each = running.pop(end)  # type: ignore[arg-type]
            row = _row(each, end, lost)  # type: ignore[arg-type]
            row["seconds"] = round(time.monotonic() - each.start, 1)
            yield row


def _row(each: Running, end: Connection, lost: Callable[[Any, str], Row]) -> Row:
    try:
        if end.poll():
            row: Row = end.recv()
            each.process.join()
            return row
        each.process.kill()
        each.process.join()
        return lost(each.job, f"time: longer than {each.limit - each.start:.0f} s")
    except EOFError:  # the process ended without a row
        each.process.join()
        return lost(each.job, f"process: exit {each.process.exitcode}")
    finally:
        end.close()


def _child(work: Callable[[Any], Row], job: Any, sender: Connection, limit_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # models print
    os.dup2(null, 2)
    faulthandler.disable()
    sender.send(work(job))
    sender.close()
    os._exit(0)  # no clean-up of what the parent owns
