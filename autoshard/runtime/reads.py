"""Which ops look at parameters whose memory was given back, and which write to what will be dropped.

Without data nothing is raised: FSDP2 gives back the memory of an unsharded parameter by making its storage empty, and
an op on a fake tensor does not look. Here each op's tensors are looked at before it runs.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.capture.ops import facts_of, run_op, tensors_of
from autoshard.capture.spans import ModuleStack
from autoshard.capture.storages import StorageLog
from autoshard.capture.values import Values
from autoshard.findings import Finding
from autoshard.runtime.unit_watch import UnitRecord, UnitWatch


class Reads(TorchDispatchMode):
    """Runs each op on fake tensors and sees which ones look at memory that was given back."""

    def __init__(self, stack: ModuleStack, log: StorageLog, values: Values, watch: UnitWatch) -> None:
        super().__init__()
        self._stack, self._log, self._values, self._watch = stack, log, values, watch
        self._freed: dict[UnitRecord, tuple[str, str, torch.Size, str]] = {}
        self._written: dict[str, tuple[UnitRecord, str]] = {}
        self._sharded = ""
        self.last_module = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compilation is off; see FakeMode

    @property
    def freed_units(self) -> Collection[UnitRecord]:
        """Units of which a parameter was read after its memory had been given back."""
        return self._freed.keys()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one op."""
        if any(issubclass(one, DTensor) for one in types):
            known = next(filter(None, map(self._watch.owner, tensors_of(args, kwargs or {}))), None)
            self._sharded = self._sharded if known is None else f"{known[1]} of unit {known[0].name}"
            return NotImplemented  # DTensor splits the op first; its local ops come back here
        with torch._C.DisableTorchFunction():
            if func.namespace == "prim":
                return func(*args, **(kwargs or {}))
            span, _ = self._stack.place()
            module = self.last_module = span.module if span is not None else ""
            facts = facts_of(func)
            if facts.writes and self._log.phase == "forward" and not self._watch.is_moving:
                self._note_writes(facts.written(args, kwargs or {}), module)
            for tensor in tensors_of(args, kwargs or {}):
                if tensor.layout is torch.strided and tensor.numel() and not tensor.untyped_storage().nbytes():
                    self._note(tensor, module)
            return run_op(func, args, kwargs or {}, self._values, module)

    def _note_writes(self, tensors: Iterable[torch.Tensor], module: str) -> None:
        for tensor in tensors:
            known = self._watch.find(tensor) if tensor.layout is torch.strided else None
            if known is not None:
                self._written.setdefault(known[1], (known[0], module))

    def _note(self, tensor: torch.Tensor, module: str) -> None:
        known = self._watch.find(tensor)
        if known is not None:
            unit, key = known
            self._freed.setdefault(unit, (self._log.phase, key, tensor.shape, module))

    def of_sharded(self, phase: str) -> str:
        """That the sharded parameter which an op met last was read; empty if there was none."""
        return f"the {phase} reads {self._sharded} while no forward of that unit runs" if self._sharded else ""

    def findings(self) -> Iterable[Finding]:
        """One for each unit."""
        for unit, (phase, key, shape, module) in self._freed.items():
            cause = _cause(unit, self._stack, phase)
            message = (
                f"the {phase} of {module or '(root)'} reads {key} {list(shape)} after its unit was resharded: {cause}"
            )
            yield Finding("AS403", "error", unit.name, message, _REMEDY_FREED, cause=cause)
        for key, (unit, module) in self._written.items():
            message = f"{module or '(root)'} writes to it while unit {unit.name} is unsharded; the change is lost"
            yield Finding("AS216", "error", key, message, _REMEDY_WRITTEN, cause=f"{module} {unit.name}")


_REMEDY_FREED = "let an ancestor own its parameters, or keep the unit unsharded after forward (reshard false)"


_REMEDY_WRITTEN = "move the update out of forward, to after the optimizer step"


def _cause(unit: UnitRecord, stack: ModuleStack, phase: str) -> str:
    """Why the unit's parameters were not there."""
    if phase == "forward":
        return "no forward of the unit was running"
    spans = [span for span in stack.spans if span.module in unit.modules]
    opaque = next((span.opaque for span in spans if span.opaque), "")
    if opaque:
        return f"its result holds a {opaque}, into which FSDP2 does not look"
    if unit.pre_backward_at is None and any(span.output_is_view for span in spans):
        return "its result is a view that was changed in place, which drops FSDP2's hook"
    if len(unit.modules) > 1 and unit.pre_backward_at is None:
        return f"{spans[-1].module}, which runs last of its modules, does not reach the loss"
    return "backward enters it through a tensor that is not in its result (kept on a module, put into a list)"
