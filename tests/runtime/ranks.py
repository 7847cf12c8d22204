"""Run a function on several ranks over gloo, for tests: forked, guarded against hangs, quick.

Ranks are forked from a clean server process (``forkserver``) that has imported torch once and never started a thread;
forking the test process itself would be unsafe after any of its tests has used torch's thread pools. The function has
to be importable by name. It may call ``note`` to say what it is doing: if a rank hangs or dies, the error names the
last note of every rank, and nothing is left running.
"""

import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRACE_SECONDS = 5
"""How long the other ranks may go on after one of them has ended with an error."""

_notes: Callable[[str], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank ended: with a value, with an error, or not at all (then ``error`` is a ``RankLost``)."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    note: str = ""


class RankLost(Exception):
    """A rank was killed because it hung, or died without a word."""


class RanksFailed(AssertionError):
    """Not all ranks ended well."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        lines = []
        for one in outcomes:
            lines.append(f"rank {one.rank} (last note: {one.note or 'none'}): {one.error!r}\n{one.trace}")
        super().__init__("\n".join(lines))
        self.outcomes = tuple(outcomes)


def note(text: str) -> None:
    """Say what this rank is about to do."""
    if _notes is not None:
        _notes(text)


def run_ranks(function: Callable[..., Any], *args: Any, world: int = 2, seconds: float = 60) -> list[Any]:
    """Values of ``function(rank, world, *args)`` on all ranks.

    Raises:
        RanksFailed: a rank raised, died or hung.
    """
    outcomes = try_ranks(function, *args, world=world, seconds=seconds)
    if any(one.error is not None for one in outcomes):
        raise RanksFailed(outcomes)
    return [one.value for one in outcomes]


def try_ranks(function: Callable[..., Any], *args: Any, world: int = 2, seconds: float = 60) -> list[Outcome]:
    """How ``function(rank, world, *args)`` ended on each rank. Never hangs."""
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            named = (function.__module__, function.__qualname__)
            process = context.Process(target=_rank, args=(named, args, rank, world, folder, sender), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, seconds)
        finally:
            for process in processes:
                process.join(0.2)
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(pipes: Sequence[multiprocessing.connection.Connection], seconds: float) -> list[Outcome]:
    ended: dict[int, Outcome] = {}
    notes = dict.fromkeys(range(len(pipes)), "")
    deadline = time.monotonic() + seconds
    while len(ended) < len(pipes) and time.monotonic() < deadline:
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in ended}
        for pipe in multiprocessing.connection.wait(list(waiting), timeout=deadline - time.monotonic()):
            rank = waiting[pipe]
            try:
                kind, content = pickle.loads(pipe.recv_bytes())
            except EOFError:
                kind, content = "lost", "died"
            if kind == "note":
                notes[rank] = content
            elif kind == "value":
                ended[rank] = Outcome(rank=rank, value=content, note=notes[rank])
            else:
                error, trace = (RankLost(content), "") if kind == "lost" else content
                ended[rank] = Outcome(rank=rank, error=error, trace=trace, note=notes[rank])
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank in range(len(pipes)):
        if rank not in ended:
            lost = RankLost(f"hung after: {notes[rank] or 'its start'}")
            ended[rank] = Outcome(rank=rank, error=lost, note=notes[rank])
    return [ended[rank] for rank in range(len(pipes))]


_started: list[Any] = []


def _context() -> Any:
    if not _started:
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "autoshard.runtime"]
        )
        _started.append(context)
    return _started[0]


def _rank(named: tuple[str, str], args: Any, rank: int, world: int, folder: str, pipe: Any) -> None:
    global _notes
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def send(kind: str, content: Any) -> None:
        pipe.send_bytes(pickle.dumps((kind, content)))

    _notes = lambda text: send("note", text)  # noqa: E731
    try:
        note("import")
        function = getattr(importlib.import_module(named[0]), named[1])
        note("init_process_group")
        store = dist.FileStore(str(Path(folder) / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        dist.barrier()  # a rank that ended at once would break connections that another still sets up
        torch.manual_seed(0)
        note("start")
        send("value", function(rank, world, *args))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            send("error", (error, trace))
        except Exception:
            send("error", (RuntimeError(f"{type(error).__name__}: {error}"), trace))
    finally:
        pipe.close()
        os._exit(0)
