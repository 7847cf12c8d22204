"""The dry run: one training step of the really sharded model on fake tensors, with a fake process group of any size.

``apply_plan`` shards the model, FSDP2's own hooks run, and torch raises what it would raise in training: parameters
read while they are sharded, dtypes that do not meet, what a reduction refuses. Some faults raise nothing without data
and are looked for beside it: parameters read after their memory was given back, units that never reduce, gradients
that do not arrive. What is found is told as diagnostics; the model is left as it was.

Nothing of the planner and of the static rules is used: the two levels of verification do not share their mistakes.
"""

import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.capture.attention import TargetFunctions
from autoshard.capture.fake import FakeMode, FakeModel
from autoshard.capture.graph import read_tree
from autoshard.capture.inputs import Pair, fake_pair, read_pairs
from autoshard.capture.libraries import as_in_training
from autoshard.capture.loss import find_loss
from autoshard.capture.quiet import quiet_machine
from autoshard.capture.spans import FAILED, ModuleStack
from autoshard.capture.step import trace_step
from autoshard.capture.storages import StorageLog
from autoshard.capture.tree import ModuleTree, dtype_name, is_dtensor
from autoshard.capture.values import Values, may_keep
from autoshard.errors import ApplyError, CaptureError, Diagnostic, PlanFormatError, PlanMismatchError
from autoshard.findings import Finding, condense
from autoshard.plan import Decisions
from autoshard.runtime.reads import Reads
from autoshard.runtime.sandbox import fake_mesh, put_back
from autoshard.runtime.unit_watch import UnitRecord, UnitWatch
from autoshard.sizes import format_bytes

LOW_PRECISION = (torch.bfloat16, torch.float16)


def dry_run(
    model: nn.Module,
    plan: Decisions,
    inputs: Any,
    loss: Callable[[Any], Any] | None = None,
    entry: str | None = None,
    world: int | None = None,
    *,
    device_kind: str = "cpu",
    trained: Collection[str] | None = None,
) -> tuple[Diagnostic, ...]:
    """What goes wrong in one training step of a model under a plan; without findings of severity ``error`` it is sound.

    Args:
        model: real or on meta, not sharded; it is left as it was.
        plan: the decisions, whoever made them.
        inputs: ``(args, kwargs)`` of one step, a list of such pairs (each is run), or a function that returns either.
        loss: from the outputs to a scalar; without it a scalar is found in the outputs.
        entry: the method that runs the step, the plan's if not given.
        world: number of ranks, the plan's if not given.
        device_kind: ``cuda`` or ``cpu``: whose attention kernels run.
        trained: keys of the parameters that get a gradient in the unsharded model; found by running it if not given.

    Raises:
        RequestError: there is a process group already, or the arguments are no question.
        CaptureError: the step of the unsharded model fails.

    Examples:
        >>> import autoshard
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> inputs = ((torch.randn(4, 8),), {})
        >>> plan = autoshard.make_plan(model, inputs, request=autoshard.Request(device="cpu", devices=64))
        >>> dry_run(model, plan, inputs)
        ()
    """
    pairs = read_pairs(inputs)
    tree = read_tree(model, "forward")
    found: list[Finding] = [
        Finding("AS213", "error", key, "it is a DTensor already", "verify before any parallelism is applied")
        for key, param in tree.params.items()
        if is_dtensor(param.param)
    ]
    if found:
        return condense(found)
    entry = plan.entry if entry is None else entry
    if not callable(getattr(model, entry, None)):
        what = f"it is to run the step, but {type(model).__name__} has no such method"
        return condense([Finding("AS401", "error", entry, what, "correct the entry of the plan")])
    ways: list[dict[str, _Way]] = []
    for pair in pairs:
        expected = trained
        if expected is None:
            options: dict[str, Any] = {"loss": loss, "entry": entry, "device_kind": device_kind}
            expected = trace_step(model, tree, pair, dtype=None, **options).trained
        with fake_mesh(plan, world) as mesh:
            rehearsal = _Rehearsal(model, tree, plan, mesh, device_kind)
            found += rehearsal.run(pair, loss, entry, expected)
            ways.append(rehearsal.ways)
    return condense([*found, *_divergent(ways, plan.reduce_unused)])


@dataclass(frozen=True, slots=True)
class _Way:
    """What one pair of inputs does with a unit: how often it ran, and which of its parameters got a gradient."""

    num_forwards: int
    graded: frozenset[str]


def _divergent(ways: list[dict[str, _Way]], reduces_unused: bool) -> Iterable[Finding]:
    """Ranks may take different ones of several pairs at the same time; the collectives have to be the same."""
    whole = [each for each in ways if each]
    for unit in whole[0] if whole else ():
        counts = sorted({each[unit].num_forwards for each in whole})
        if len(counts) > 1:
            message = (
                f"it runs {' or '.join(map(str, counts))} times, depending on the input; ranks that take different "
                "ways would wait for each other forever"
            )
            yield Finding("AS218", "error", unit, message, "leave its parameters to a module that every rank runs")
        elif not reduces_unused and len({each[unit].graded for each in whole}) > 1:
            union = frozenset[str]().union(*(each[unit].graded for each in whole))
            some = min(union - frozenset[str].intersection(*(each[unit].graded for each in whole)))
            message = (
                f"{some} of unit {unit} gets a gradient for some inputs only; ranks that take different ways would "
                "reduce different buffers"
            )
            yield Finding("AS239", "error", "reduce_unused", message, "set it to true")


class _Rehearsal:
    """One step of the sharded model, and what is found in it."""

    def __init__(self, model: nn.Module, tree: ModuleTree, plan: Decisions, mesh: DeviceMesh, device_kind: str) -> None:
        self._model, self._tree, self._plan, self._mesh = model, tree, plan, mesh
        self._device_kind = device_kind
        self._log = StorageLog()
        self._stack = ModuleStack(tree, self._log)
        self._values = Values()
        self._found: list[Finding] = []
        self.ways: dict[str, _Way] = {}

    def run(self, pair: Pair, loss: Callable[[Any], Any] | None, entry: str, trained: Collection[str]) -> list[Finding]:
        """Findings of one step on one pair of inputs."""
        mode, model = FakeMode(), self._model
        with (
            quiet_machine(),
            put_back(self._tree),
            FakeModel(self._tree, mode, None, keeps_aliases=True) as fake,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of torch, on what the findings say better
            for twin, original in fake.buffers:
                if may_keep(original) and original.device.type == "cpu":
                    self._values.set(twin, original.detach().clone())
            given, _ = fake_pair(pair, mode, self._values, None)
            if not model.training:
                model.train()
            with torch.enable_grad(), as_in_training(), torch.compiler.set_stance("force_eager"), mode:
                if self._apply():
                    watch = UnitWatch(model, self._plan)
                    reads = Reads(self._stack, self._log, self._values, watch)
                    with self._stack.watching(), TargetFunctions(self._device_kind, self._values), reads:
                        is_whole = self._step(given, loss, entry, reads)
                    self._found += reads.findings()
                    if is_whole:
                        self._look_at(watch, trained, reads.freed_units)
        return self._found

    def _apply(self) -> bool:
        """Shard the model; false if that cannot be done."""
        # Imported here: the package's own module imports this one.
        from autoshard.runtime import apply_plan

        try:
            apply_plan(self._model, self._plan, self._mesh)
        except PlanMismatchError as error:
            again = "make the plan again from this model, or correct it"
            for each in error.differences:
                message = f"the plan says {each.planned}, found {each.found}"
                self._found.append(Finding("AS401", "error", each.where, message, again))
            return False
        except PlanFormatError as error:
            self._found.append(Finding("AS401", "error", error.where, error.reason, "correct the plan"))
            return False
        except ApplyError as error:
            for fqn in error.modules[:1] or ("",):
                message = f"fully_shard or what belongs to it failed ({error.phase}): {_first_line(error.reason)}"
                self._found.append(Finding("AS401", "error", fqn or "(root)", message))
            return False
        return True

    def _step(self, given: Pair, loss: Callable[[Any], Any] | None, entry: str, reads: "Reads") -> bool:
        """Forward, loss and backward; false if something was raised."""
        phase = "forward"
        try:
            args, kwargs = given
            if entry == "forward":
                outputs = self._model(*args, **kwargs)
            else:
                outputs = self._stack.run_entry(getattr(self._model, entry), args, kwargs)
            phase = "loss"
            scalar, _ = find_loss(outputs, loss)
            del outputs
            if scalar.dtype in LOW_PRECISION:
                self._note_loss(scalar.dtype)
            phase = "backward"
            self._log.begin_backward()
            scalar.backward()
        except CaptureError as error:  # of the loss
            self._found.append(Finding("AS402", "error", error.fqn, f"in the {phase}: {error.reason}", error.remedy))
            return False
        except Exception as error:
            if _is_own(error):
                raise
            where = getattr(error, FAILED, None)
            if where is None:
                where = reads.last_module if phase == "backward" else ""
            message = f"the {phase} raises {type(error).__name__}: {_first_line(str(error))}"
            remedy = ""
            if "mixed torch.Tensor and DTensor" in str(error):
                message, remedy = (
                    reads.of_sharded(phase) or message,
                    "let the module that reads it, or an ancestor, own it",
                )
            elif "_chunk_cat expects non-empty" in str(error):
                empty = [key for key, param in self._tree.params.items() if not param.param.numel()]
                remedy = f"list parameters without elements as replicated: {', '.join(empty)}"
            self._found.append(Finding("AS402", "error", where or "(root)", message, remedy))
            return False
        return True

    def _note_loss(self, dtype: torch.dtype) -> None:
        message = f"the loss is computed in {dtype_name(dtype)}"
        remedy = "cast what the loss is computed from to float32, or set the precision of outputs to float32"
        self._found.append(Finding("AS408", "note", "(root)", message, remedy))

    def _look_at(self, watch: UnitWatch, trained: Collection[str], freed: Collection[UnitRecord]) -> None:
        """After a whole step: what torch does not complain about."""
        told: set[str] = {key for unit in freed for key in unit.keys}
        for unit in watch.units:
            expects = [key for key in unit.keys if key in trained]
            for key in sorted(unit.sparse):
                self._found.append(Finding("AS214", "error", key, "a sparse gradient cannot be reduced", cause=key))
            if not unit.keys or unit in freed:
                continue
            if not unit.is_sharded or (expects and not watch.num_pre_backwards):
                told.update(unit.keys)
                self._found.append(_never_reduced(unit, self._stack, bool(expects)))
            elif unit.num_forwards == 0:
                message = "no forward of the unit runs in this step, so it is neither gathered nor reduced"
                self._found.append(Finding("AS407", "note", unit.name, message))
            elif unit.is_late and unit.modules != ("",):
                self._found += _late(unit, watch)
        params = dict(self._model.named_parameters())
        for unit in watch.units:
            if unit.keys:
                graded = frozenset(key for key in unit.keys if params[key].grad is not None)
                self.ways[unit.name] = _Way(unit.num_forwards, graded)
        for key in self._tree.params:
            param = params[key]
            if key in told:
                continue
            if not isinstance(param, DTensor) and key not in self._plan.replicated:
                message = "neither sharded nor replicated: each rank would train a copy of its own"
                self._found.append(Finding("AS405", "error", key, message))
            elif key in trained and param.grad is None:
                message = "it gets a gradient in the unsharded model and none in the sharded one"
                remedy = "look for an alias of it that was made before it was sharded, such as self.cache = [self.w]"
                self._found.append(Finding("AS405", "error", key, message, remedy))


def _never_reduced(unit: UnitRecord, stack: ModuleStack, expects: bool) -> Finding:
    """Backward went by without FSDP2: no result of any unit had a hook."""
    message = (
        "no hook of FSDP2 ran in backward, so the unit is not reduced"
        if unit.is_sharded
        else ("it is still unsharded after backward")
    )
    message += ": each rank would train on its own gradients, or on none" if expects else ""
    cause = next((s.opaque for s in stack.spans if s.module in unit.modules and s.opaque), "")
    if cause:
        message += f"; its result holds a {cause}, into which FSDP2 does not look"
    remedy = "return tensors in a tuple, list, dict or dataclass"
    return Finding("AS404", "error" if expects else "warning", unit.name, message, remedy)


def _late(unit: UnitRecord, watch: UnitWatch) -> Iterable[Finding]:
    """A unit that is freed at the end of backward although others came after it."""
    if unit.pre_backward_at is None or not unit.trains:
        return
    others = sum(
        other.pre_backward_at is not None and other.pre_backward_at > unit.pre_backward_at and not other.contains(unit)
        for other in watch.units
    )
    if not others:
        return
    size = format_bytes(unit.num_unsharded_bytes)
    message = (
        f"none of its inputs that FSDP2 sees needs a gradient, so it stays unsharded ({size}, and as much of "
        f"gradients) to the end of backward, while {others} more run theirs"
    )
    yield Finding("AS406", "note", unit.name, message, cause="late")


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "no message"


_OWN = str(Path(__file__).parent.parent)


def _is_own(error: Exception) -> bool:
    """A slip in this package's own code and not in torch's or the model's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_here = trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN)
    return is_here and isinstance(error, AttributeError | NameError | KeyError | AssertionError)
