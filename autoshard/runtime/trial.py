"""A trial: a few real training steps on two gloo ranks, compared with the same steps in one process.

What a dry run cannot see are values: parameters that come back changed or unchanged, faults that show only after
several steps, ranks that wait for each other. Both ranks build the model, take over the values of the first, and train
it under the plan; beside it each rank keeps unsharded copies of the model, one for each rank, and averages their
gradients by hand. Every rank weights its loss differently, so that a gradient that was not averaged shows although the
inputs are the same. Computed in the stored dtypes: the plan's precision would hide small differences.

The parent only listens. A rank that says nothing for a while is ended, and what it did last names the unit.
"""

import copy
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from autoshard.capture.containers import map_tensors
from autoshard.capture.inputs import Pair
from autoshard.capture.loss import find_loss
from autoshard.errors import AutoshardError, Diagnostic
from autoshard.findings import Finding, condense
from autoshard.plan import Axis, Decisions, Plan, Precision, decisions_of
from autoshard.runtime.unit_watch import UnitWatch

WORLD = 2
LEARNING_RATE = 1e-2
MAX_BYTES = 200 * 10**6
"""Parameters of a model that a trial takes: each rank holds four copies of them."""
SILENCE_S = 60.0
"""Seconds without a word after which a rank counts as hung."""
GRACE_S = 10.0
"""Seconds that the other ranks get after one of them has failed."""

UPDATE_TOLERANCE = {False: 1e-2, True: 0.15}
"""Part of a parameter's whole change by which it may differ, by whether some parameters are stored in low precision.

A gradient that is not averaged is off by a third.
"""
LOSS_TOLERANCE = {False: 1e-3, True: 3e-2}
"""Part of the loss, at least of 1, by which it may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained.

    Attributes:
        model: real, not on meta, not sharded.
        pairs: ``(args, kwargs)`` of steps; ranks and steps take them in turn.
        loss: from the outputs to a scalar; ``None`` looks for one.
    """

    model: nn.Module
    pairs: tuple[Pair, ...]
    loss: Callable[[Any], Any] | None = None


def train_beside_reference(
    load: Callable[[], Case],
    plan: Decisions,
    num_steps: int,
    silence_s: float = SILENCE_S,
    start: str | None = None,
) -> tuple[Diagnostic, ...]:
    """What goes wrong in real training steps under a plan; nothing if they equal those of one process.

    Args:
        load: builds the model; it is called on each rank and has to be importable by name (it is pickled).
        plan: its mesh becomes one axis of two ranks, its precision that of the stored parameters.
        num_steps: steps to train.
        silence_s: a rank that begins nothing new for so long counts as hung.
        start: ``fork`` if the ranks are to take over what this process, which may run no threads, has imported; a
            server of fresh processes, or a new process each where there is none, if not given.

    Returns:
        Findings of severity ``error``, none if all is well.

    Raises:
        AutoshardError: what ``load`` raised.
    """
    decisions = decisions_of(plan) if isinstance(plan, Plan) else plan
    outcomes = _run_ranks(pickle.dumps(load), decisions, num_steps, silence_s, start)
    for each in outcomes:
        if isinstance(each.error, AutoshardError):
            raise each.error
    found = [finding for each in outcomes for finding in each.findings]
    # What the other rank raised when its connection broke is no finding of its own.
    ended = [finding for finding in found if finding.code == "AS410"]
    return condense(ended or found)


@dataclass(slots=True)
class _Outcome:
    """How one rank ended; ``doing`` is what it began last, with the unit."""

    doing: tuple[str, str] = ("start", "")
    findings: tuple[Finding, ...] = ()
    error: Exception | None = None
    is_over: bool = False


def _run_ranks(load: bytes, plan: Decisions, num_steps: int, silence_s: float, start: str | None) -> list[_Outcome]:
    methods = multiprocessing.get_all_start_methods()
    start = start or ("forkserver" if "forkserver" in methods else "spawn")
    context: Any = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "autoshard.runtime"])
    outcomes = [_Outcome() for _ in range(WORLD)]
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(WORLD):
            receiver, sender = context.Pipe(duplex=False)
            args = (rank, str(Path(folder) / "store"), load, plan, num_steps, sender)
            process = context.Process(target=_rank, args=args, daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            _listen(pipes, outcomes, silence_s)
        finally:
            for process in processes:
                process.join(0.2)
                if process.is_alive():
                    process.kill()
                process.join()
    return outcomes


def _listen(pipes: list[Any], outcomes: list[_Outcome], silence_s: float) -> None:
    """Take in what the ranks say until all are over, or nothing is said any more."""
    by_pipe = dict(zip(pipes, outcomes, strict=True))
    while by_pipe:
        has_failed = any(each.findings or each.error for each in outcomes)
        ready = multiprocessing.connection.wait(list(by_pipe), timeout=GRACE_S if has_failed else silence_s)
        if not ready:
            break
        for pipe in ready:
            outcome = by_pipe[pipe]
            try:
                kind, content = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                kind, content = "died", None
            if kind == "doing":
                outcome.doing = content
                continue
            outcome.is_over = True
            del by_pipe[pipe]
            if kind == "done":
                outcome.findings = content
            elif kind == "refused":
                outcome.error = content
            elif not any(finding.code == "AS410" for each in outcomes for finding in each.findings):
                # A second death has the same cause, or comes of the first.
                outcome.findings = (_stopped(outcomes, "a rank died without a word"),)
    # A rank that waits for one that has failed is no finding of its own.
    if by_pipe and not any(each.findings or each.error for each in outcomes):
        outcomes[0].findings = (_stopped(outcomes, f"the ranks hang: nothing new began for {silence_s:.0f} s"),)


def _stopped(outcomes: list[_Outcome], what: str) -> Finding:
    units = [unit for each in outcomes for unit in each.doing[1:] if unit and not each.is_over]
    units += [each.doing[1] for each in outcomes if each.doing[1]]
    doing = "; ".join(f"rank {rank}: {each.doing[0]}" for rank, each in enumerate(outcomes))
    remedy = "let every rank run the same units in the same order, or give what only some run to an ancestor"
    return Finding("AS410", "error", units[0] if units else "(root)", f"{what}; last began {doing}", remedy)


def _rank(rank: int, store: str, load: bytes, plan: Decisions, num_steps: int, pipe: Any) -> None:
    """One rank, in a process of its own."""
    os.dup2(2, 1)  # what the model's code prints must not get into the output of a command
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # Compiling would take minutes and change sums, and what is tried is the sharding.
    torch.compiler.set_stance("force_eager")
    warnings.simplefilter("ignore")  # each would come twice, about a model that is looked at anyway

    def send(kind: str, content: Any) -> None:
        pipe.send_bytes(pickle.dumps((kind, content)))

    training: _Training | None = None
    try:
        torch.manual_seed(0)
        send("doing", ("building the model", ""))
        case = pickle.loads(load)()
        dist.init_process_group("gloo", store=FileStore(store, WORLD), rank=rank, world_size=WORLD)
        training = _Training(case, plan, rank, lambda what, unit: send("doing", (what, unit)))
        send("done", tuple(training.run(num_steps)))
    except AutoshardError as error:
        send("refused", error) if training is None else send("done", (training.failure(error),))
    except Exception as error:
        if training is None:
            traceback.print_exc()
            send("done", (Finding("AS402", "error", "(root)", f"rank {rank}: {_told(error)}"),))
        else:
            send("done", (training.failure(error),))
    finally:
        pipe.close()
        os._exit(0)  # without waiting for process groups whose other side may hang


class _Training:
    """The steps of one rank, sharded and unsharded."""

    def __init__(self, case: Case, plan: Decisions, rank: int, tell: Callable[[str, str], None]) -> None:
        self._case, self._rank = case, rank
        self._tell_parent = tell
        self._doing = ("preparing", "")
        self._step = "step 1"
        self._model = case.model.cpu().train()
        self._plan = _for_ranks(plan, self._model)
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            _take_from_first_rank(tensor)
        self._pairs = tuple(
            map_tensors(pair, lambda given: _take_from_first_rank(given.clone())) for pair in case.pairs
        )
        self._replicas = [copy.deepcopy(self._model) for _ in range(WORLD)]
        dtypes = {param.dtype for param in self._model.parameters() if param.is_floating_point()}
        self._is_low = any(dtype.itemsize < 4 for dtype in dtypes)
        self._start = {key: param.detach().clone() for key, param in self._model.named_parameters()}

    def failure(self, error: Exception) -> Finding:
        """An error as a finding at the unit that was at work."""
        what, unit = self._doing
        return Finding("AS402", "error", unit or "(root)", f"{what} raises {_told(error)}")

    def run(self, num_steps: int) -> list[Finding]:
        """Train both ways; what differs."""
        # Imported here: the package's own module imports this one.
        from autoshard.runtime import apply_plan

        losses = [self._reference_step(step) for step in range(num_steps)]
        if not all(math.isfinite(loss) for of_step in losses for loss in of_step):
            message = f"the losses of one process are {losses}, so nothing can be compared"
            return [Finding("AS409", "warning", "(root)", message, "give inputs and initial values that train")]
        expected = [of_step[self._rank] for of_step in losses]
        self._tell("apply_plan", "")
        apply_plan(self._model, self._plan)
        UnitWatch(self._model, self._plan, lambda unit, event: self._tell(f"{self._step}: {event} of {unit}", unit))
        optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        found: list[Finding] = []
        for step in range(num_steps):
            self._step = f"step {step + 1}"
            self._tell(f"{self._step}: forward", "")
            loss = self._loss(self._model, step, self._rank)
            self._tell(f"{self._step}: backward", "")
            (loss * (1 + self._rank)).backward()
            self._tell(f"{self._step}: optimizer", "")
            optimizer.step()
            optimizer.zero_grad()
            tolerance = LOSS_TOLERANCE[self._is_low] * max(1.0, abs(expected[step]))
            if not abs(loss.item() - expected[step]) <= tolerance:
                message = (
                    f"in step {step + 1} the loss of rank {self._rank} is {loss.item():.7g}, in one process it is "
                    f"{expected[step]:.7g}"
                )
                found.append(Finding("AS409", "error", "(root)", message, _REMEDY, cause="loss"))
        return found + self._compare()

    def _tell(self, what: str, unit: str) -> None:
        self._doing = (what, unit)
        self._tell_parent(what, unit)

    def _reference_step(self, step: int) -> list[float]:
        """One step of all replicas, their gradients averaged; the loss of each."""
        self._tell(f"step {step + 1} in one process", "")
        losses = []
        for rank, replica in enumerate(self._replicas):
            loss = self._loss(replica, step, rank)
            (loss * (1 + rank)).backward()
            losses.append(loss.item())
        for params in zip(*(replica.parameters() for replica in self._replicas), strict=True):
            grads = [param.grad for param in params if param.grad is not None]
            mean = sum(grads) / WORLD if grads else None
            with torch.no_grad():
                for param in params:
                    if mean is not None:
                        param -= LEARNING_RATE * mean
                    param.grad = None
        return losses

    def _loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        args, kwargs = copy.deepcopy(self._pairs[(step + rank) % len(self._pairs)])
        torch.manual_seed(1000 * (step + 1) + rank)
        call = model if self._plan.entry == "forward" else getattr(model, self._plan.entry)
        return find_loss(call(*args, **kwargs), self._case.loss)[0]

    def _compare(self) -> list[Finding]:
        """Every parameter after the last step."""
        found = []
        reference = dict(self._replicas[self._rank].named_parameters())
        # Gradients that cancel out (a bias of attention's keys) are nothing but the rounding of other ones.
        changes = (
            _largest(param.detach() - self._start[key]) for key, param in reference.items() if _has_values(param)
        )
        largest_change = max(changes, default=0.0)
        for key, param in self._model.named_parameters():
            self._tell(f"comparing {key}", "")
            value = param.full_tensor() if isinstance(param, DTensor) else param
            expected, start = reference[key].detach(), self._start[key]
            if not _has_values(expected):
                continue
            gap = _largest(value.detach() - expected)
            change = _largest(expected - start)
            rounding = 16 * torch.finfo(expected.dtype).eps * max(_largest(expected), largest_change)
            if not gap <= UPDATE_TOLERANCE[self._is_low] * change + rounding:
                message = (
                    f"after training it differs from the same steps in one process by {gap:.3g}, while these changed "
                    f"it by {change:.3g}"
                )
                found.append(Finding("AS409", "error", key, message, _REMEDY, cause="parameter"))
        return found


_REMEDY = "verify with --level dry-run first; else look for state that a forward changes, or values that differ by rank"


def _take_from_first_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite with the first rank's values; as bytes, because gloo does not know every dtype."""
    with torch.no_grad():
        values = tensor.detach().cpu().contiguous().reshape(-1)
        if values.numel():
            dist.broadcast(values.view(torch.uint8), 0)
            tensor.copy_(values.reshape(tensor.shape))
    return tensor


def _input_of_first_rank(tensor: torch.Tensor) -> torch.Tensor:
    taken = _take_from_first_rank(tensor.detach().cpu().clone())
    return taken.requires_grad_(tensor.requires_grad)


def _for_ranks(plan: Decisions, model: nn.Module) -> Decisions:
    """The plan on two ranks and in the stored dtypes; a dim that two ranks do not divide becomes the first."""
    shapes = {key: param.shape for key, param in model.named_parameters()}

    def divides(key: str, dim: int) -> bool:
        return key not in shapes or dim >= len(shapes[key]) or shapes[key][dim] % WORLD == 0

    units = tuple(
        msgspec.structs.replace(
            unit, shard_dims={key: dim for key, dim in unit.shard_dims.items() if divides(key, dim)}
        )
        for unit in plan.units
    )
    axis = Axis(name="shard", size=WORLD, role="shard")
    return msgspec.structs.replace(plan, mesh=(axis,), precision=Precision(), units=units)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def _told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
