"""Where the model asks a parameter for its dtype to bring a tensor to it, outside of the module that holds it.

Under FSDP2 the answer is the compute dtype only while the parameter is gathered, and the stored one before. In the
trace it is always the compute dtype, so nothing is copied there. Which of the two it is depends on the units of a
plan: what would be copied is noted here, ``simulate`` decides.

A tensor is brought to the dtype of a parameter if the two dtypes are asked one right after the other (``if x.dtype !=
p.dtype``), or if the tensor is cast to the answer later in the same forward. What is asked inside of numbered blocks
is not noted: the unit that holds the parameter holds, or is inside of, such a block as a rule.
"""

from typing import Any, NamedTuple

import torch

from autoshard.capture.spans import ModuleStack, Span
from autoshard.capture.storages import StorageLog
from autoshard.capture.tree import ModuleTree
from autoshard.ir import DtypeRead


class _Found(NamedTuple):
    key: str
    span: Span
    number: int
    position: int
    numel: int


class _Asked(NamedTuple):
    """A tensor whose dtype was asked; the tensor itself is not kept, it would live on."""

    number: int
    numel: int
    span: Span


class DtypeReads:
    """Follows the functions that the model calls in forward.

    Args:
        tree: the model's.
        stack: of the running modules.
        log: of the step; what is recorded elsewhere is not followed.
        dtype: the compute dtype, ``None`` if parameters have their stored ones.
    """

    def __init__(self, tree: ModuleTree, stack: ModuleStack, log: StorageLog, dtype: torch.dtype | None) -> None:
        self._tree, self._stack, self._log, self._dtype = tree, stack, log, dtype
        self._asked: tuple[str, Span] | None = None
        self._is_next = False
        self._tensor: _Asked | None = None
        self._found: dict[tuple[str, int], _Found] = {}

    def see(self, func: Any, args: tuple) -> None:
        """A function is called; the function mode calls this before it."""
        if self._dtype is None or self._stack.log is not self._log or self._log.phase != "forward":
            return
        span = self._stack.current
        if span is None or not args:
            return
        before, self._tensor = self._tensor, None
        is_next, self._is_next = self._is_next, False
        if getattr(func, "__self__", None) is torch.Tensor.dtype:
            self._ask(args[0], span, before, is_next)
        elif func is torch.Tensor.to and self._is_in(span) and self._dtype in args[1:]:
            self._note(self._tensor_of(args[0], span))

    def reads(self) -> tuple[DtypeRead, ...]:
        """What was found, in order; once the forward has ended."""
        return tuple(self._read(one) for one in self._found.values())

    def _ask(self, tensor: torch.Tensor, span: Span, before: _Asked | None, is_next: bool) -> None:
        if tensor.layout is not torch.strided or tensor.dtype is not self._dtype:
            return
        key = self._log.param_keys.get(tensor.untyped_storage()._cdata)
        if key is None:
            self._tensor = self._tensor_of(tensor, span)
            if is_next and self._is_in(span):
                self._note(self._tensor)
            return
        entry = self._tree.params[key]
        if entry.param.dtype is self._dtype or not set(span.stack()).isdisjoint(entry.holders) or _is_numbered(span):
            return
        self._asked, self._is_next = (key, span), True
        if before is not None and before.span is span:
            self._note(before)

    def _is_in(self, span: Span) -> bool:
        return self._asked is not None and self._asked[1] is span

    def _tensor_of(self, tensor: torch.Tensor, span: Span) -> _Asked | None:
        """``None`` if it is copied anyway, or no op has shown it."""
        number = self._log.number_of(tensor) if tensor.dtype is self._dtype else None
        return None if number is None else _Asked(number, tensor.numel(), span)

    def _note(self, tensor: _Asked | None) -> None:
        if self._asked is None or tensor is None:
            return
        key, span = self._asked
        found = _Found(key, span, tensor.number, len(self._log.forward), tensor.numel)
        self._found.setdefault((key, tensor.number), found)

    def _read(self, found: _Found) -> DtypeRead:
        """The stored copy is a variable of the forward that asked; an argument is held beside its copy."""
        record, stop = self._log.records[found.number], found.span.forward_end
        stored = self._tree.params[found.key].param.dtype
        held = stop if record.kind != "input" else self._stack.spans[0].forward_end
        is_argument = record.kind == "input" or record.born < found.span.forward_start
        return DtypeRead(
            param=found.key,
            module=found.span.module,
            position=found.position,
            stored_bytes=found.numel * stored.itemsize,
            stored_stop=stop,
            cast_bytes=found.numel * self._dtype.itemsize if is_argument and self._dtype is not None else 0,
            cast_stop=held,
        )


def _is_numbered(span: Span) -> bool:
    return any(part.isdigit() for part in span.module.split("."))
