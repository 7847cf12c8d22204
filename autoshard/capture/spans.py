"""Which module is running, now and in the step's past.

Every call of a module goes through ``nn.Module._call_impl``; while a step is traced that one function is wrapped, so
that each call of a module of the tree is a *span*. (Global module hooks would do but for one thing: they do not see
keyword arguments.) A ``child.forward(x)`` does not go through it and fires no hooks, rightly.

Backward ops find their span by autograd's sequence numbers: a node gets the next number when it is made, so the
numbers noted at each begin and end of a span tell which span made a node. Code that runs again during backward
(``torch.utils.checkpoint``) takes up the spans of its first run.
"""

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn

from autoshard.capture.containers import kind_of, opaque_part, visible_tensors
from autoshard.capture.storages import StorageLog
from autoshard.capture.tree import ModuleTree

if TYPE_CHECKING:
    from autoshard.capture.outline import outliner, skips

NO_SEQUENCE = 1 << 63
"""Nodes that accumulate gradients have numbers from here on."""


FAILED = "_autoshard_module"
"""Attribute of an exception: FQN of the innermost module that it left."""


class Span:
    """One run of a module's hooked forward; positions are filled in while the step goes on."""

    __slots__ = (
        "backward_end", "backward_start", "changes_input", "escapes", "forward_end", "forward_start", "hooked_at",
        "input_bytes", "inputs", "inputs_need_grad", "is_open", "module", "opaque", "output_bytes", "output_is_view",
        "output_kind", "output_needs_grad", "outputs", "param_reads", "parent",
    )  # fmt: skip

    def __init__(self, module: str, parent: "Span | None", start: int) -> None:
        self.module, self.parent = module, parent
        self.forward_start = self.forward_end = start
        self.backward_start: int | None = None
        self.backward_end = 0
        self.is_open = True
        self.escapes = self.changes_input = False
        self.hooked_at: int | None = None
        self.param_reads: dict[str, int] = {}
        self.inputs: set[int] = set()
        self.inputs_need_grad = self.output_needs_grad = self.output_is_view = False
        self.output_kind, self.opaque = "none", ""
        self.input_bytes = self.output_bytes = 0
        self.outputs: set[int] = set()

    def stack(self) -> tuple[str, ...]:
        """FQNs of the modules whose forward is running, outermost first."""
        above = self.parent.stack() if self.parent else ()
        return (*above, self.module)

    def touch_backward(self, index: int) -> None:
        """Note that the backward op at ``index`` belongs to this run."""
        self.backward_start = index if self.backward_start is None else min(index, self.backward_start)
        self.backward_end = max(index + 1, self.backward_end)

    def read_in_backward(self, key: str, index: int) -> None:
        """Note that the backward op at ``index``, which belongs to this run, reads a parameter."""
        self.param_reads[key] = min(index, self.param_reads.get(key, index))

    def early_params(self) -> tuple[str, ...]:
        """Keys of the parameters that backward reads before the hook on the result, in the order of the reads."""
        end = NO_SEQUENCE if self.hooked_at is None else self.hooked_at
        return tuple(key for key, index in self.param_reads.items() if self.hooked_at is None or index < end)


def note_escape(span: "Span | None", number: int) -> None:
    """A tensor is used: each ended run in which it was made must have handed it out where FSDP2 sees it."""
    while span is not None and not span.is_open:
        if number not in span.outputs:
            span.escapes = True
        span = span.parent


class Checkpointed:
    """One checkpointed function: where it was called, and the spans and ops of its first run."""

    def __init__(self, caller: "Span | None") -> None:
        self.caller = caller
        self.spans: list[Span] = []
        self.start = self.end = 0

    def modules(self) -> list[str]:
        """The modules that recompute: the caller if the function is its whole forward, else those that it runs."""
        caller = self.caller
        if caller is not None and (self.start, self.end) == (caller.forward_start, caller.forward_end):
            return [caller.module]
        top = [span.module for span in self.spans if span.parent is caller]
        return top or ([caller.module] if caller is not None else [])


class ModuleStack:
    """The stack of running modules and the record of all spans.

    Attributes:
        frames: spans that are open now, outermost first.
        spans: all spans in the order of their start.
        num_calls: runs by module, without those that compute again.
        recomputed: FQNs of the modules that run again during backward.
    """

    def __init__(self, tree: ModuleTree, log: StorageLog) -> None:
        self._tree, self._log = tree, log
        self.frames: list[Span] = []
        self.spans: list[Span] = []
        self.num_calls: Counter[str] = Counter()
        self.recomputed: set[str] = set()
        self._by_module: dict[str, list[Span]] = defaultdict(list)
        self._numbers: list[int] = [0]
        self._number_spans: list[Span | None] = [None]
        self._recording: list[Checkpointed] = []
        self._replaying: list[Iterator[Span]] = []
        self._is_entry = False
        self._last_backward: Span | None = None
        self._first_number = 0
        self._original: Callable[..., Any] = nn.Module._call_impl
        self.outliner: outliner.Outliner | skips.Skips | None = None

    @property
    def tree(self) -> ModuleTree:
        """The model's tree."""
        return self._tree

    @property
    def log(self) -> StorageLog:
        """Where the step is recorded now."""
        return self._log

    @property
    def current(self) -> Span | None:
        """The innermost open span."""
        return self.frames[-1] if self.frames else None

    @property
    def is_recomputing(self) -> bool:
        """Forward code runs although the step is in its backward."""
        return self._log.phase == "backward" and bool(self.frames or self._replaying)

    def span_of(self, number: int) -> Span | None:
        """The span that was running when the autograd node of that number was made."""
        return self._number_spans[bisect.bisect_right(self._numbers, number) - 1]

    def place(self) -> tuple[Span | None, bool]:
        """The run of a module to which the op that runs now belongs, and whether it computes forward code again."""
        if self._log.phase == "forward":
            return self.current, False
        if self.is_recomputing:
            self._last_backward = self.current
            return self._last_backward, True
        node = torch._C._current_autograd_node()
        number = NO_SEQUENCE if node is None else node._sequence_nr()
        # Else a gradient is accumulated (it belongs to what was just computed), or a block is traced alone in the
        # middle of the step's own backward.
        if self._first_number <= number < NO_SEQUENCE:
            self._last_backward = self.span_of(number)
        return self._last_backward, False

    def note_change(self, number: int) -> None:
        """An op changes the storage of that number in place: for each open run, it may be one of its inputs."""
        for span in self.frames:
            if number in span.inputs:
                span.changes_input = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Modules of the tree are followed, and so are checkpointed functions."""
        original = self._original = nn.Module._call_impl
        stack = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            fqn = stack._tree.fqn_of.get(id(module))
            if fqn is None or (stack._is_entry and not fqn):
                return original(module, *args, **kwargs)

            def run(*a: Any, **k: Any) -> Any:
                return original(module, *a, **k)

            if stack.outliner is not None and stack.outliner.may_replay(fqn):
                replayed, result = stack.outliner.call(fqn, module, run, args, kwargs)
                if replayed:
                    return result
            return stack._run(fqn, run, args, kwargs)

        for fqn, name in self._tree.methods:
            module = self._tree.module(fqn)
            # An attribute of the instance; whoever made the tensors fake restores the attributes.
            vars(module)[name] = partial(self._run_method, fqn, getattr(module, name))
        with (
            mock.patch.object(nn.Module, "_call_impl", call),
            mock.patch.object(
                torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", self._checkpoint_generator()
            ),
            mock.patch.object(torch.utils.checkpoint, "CheckpointFunction", self._checkpoint_function()),
        ):
            yield

    def _run_method(self, fqn: str, method: Callable, *args: Any, **kwargs: Any) -> Any:
        if any(span.module == fqn for span in self.frames):
            return method(*args, **kwargs)
        return self._run(fqn, method, args, kwargs)

    def run_entry(self, method: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a method of the root that is not ``forward``, as a hooked forward of the root."""
        self._is_entry = True
        try:
            return self._run("", method, args, kwargs)
        finally:
            self._is_entry = False

    def hooked(self, module: nn.Module) -> Callable[..., Any]:
        """The hooked call of a module, which is not followed."""
        return partial(self._original, module)

    def run_block(self, fqn: str, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a module that is traced alone, as a hooked forward."""
        return self._run(fqn, function, args, kwargs)

    @contextmanager
    def apart(self, log: StorageLog) -> Iterator[None]:
        """What runs in here is followed from the beginning and recorded in ``log``; then all is as before."""
        kept = dict(vars(self))
        vars(self).update(vars(ModuleStack(self._tree, log)))
        self.outliner, self._original = kept["outliner"], kept["_original"]
        self._first_number = torch._C._autograd._get_sequence_nr()
        try:
            yield
        finally:
            vars(self).update(kept)

    def replay(self, spans: Sequence[Span], parents: Sequence[int]) -> list[Span]:
        """Add the module runs of a block that is not run, inside the current one.

        Args:
            spans: the runs, with their positions.
            parents: number of the run around each, -1 for the current one.
        """
        for span, parent in zip(spans, parents, strict=True):
            span.parent = self.current if parent < 0 else spans[parent]
            self.spans.append(span)
            self._by_module[span.module].append(span)
            self.num_calls[span.module] += 1
            for checkpointed in self._recording:
                checkpointed.spans.append(span)
        return list(spans)

    def set_last_backward(self, span: Span) -> None:
        """The backward ops that were written down last belong to this run."""
        self._last_backward = span

    def _run(self, fqn: str, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        again = self._log.phase == "backward"
        span = self._taken_up(fqn) if again else self._begin(fqn, args, kwargs)
        if span is None:  # first seen in backward: no forward to take up
            return function(*args, **kwargs)
        self.frames.append(span)
        self._mark()
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            if not hasattr(error, FAILED):  # on the error itself: to keep the error would keep its tensors alive
                setattr(error, FAILED, fqn)
            raise
        finally:
            self.frames.pop()
            self._mark()
            if not again:
                span.is_open = False
                span.forward_end = len(self._log.forward)
        if not again:
            self._note_result(span, result)
        self.hook(span, visible_tensors(result))
        return result

    def hook(self, span: Span, tensors: Sequence[torch.Tensor]) -> None:
        """Put a hook where FSDP2 puts its own, to see when it fires; a run that computes again is hooked as well."""
        for tensor in tensors if torch.is_grad_enabled() else ():
            if tensor.requires_grad:
                span.output_needs_grad = True
                tensor.register_hook(lambda _: self._fired(span))

    def _fired(self, span: Span) -> None:
        if span.hooked_at is None:
            span.hooked_at = len(self._log.backward)

    def _begin(self, fqn: str, args: tuple, kwargs: dict[str, Any]) -> Span:
        span = Span(fqn, self.current, len(self._log.forward))
        self.spans.append(span)
        self._by_module[fqn].append(span)
        for checkpointed in self._recording:
            checkpointed.spans.append(span)
        self.num_calls[fqn] += 1
        given = visible_tensors((args, kwargs))
        span.inputs_need_grad = any(tensor.requires_grad for tensor in given)
        span.inputs = self._log.known(tensor for tensor in given if tensor.requires_grad)
        span.input_bytes = self._log.bytes_of(given)
        return span

    def _note_result(self, span: Span, result: Any) -> None:
        tensors = visible_tensors(result)
        span.output_kind, span.opaque = kind_of(result), opaque_part(result)
        span.output_needs_grad = any(tensor.requires_grad for tensor in tensors)
        span.output_is_view = any(tensor._is_view() for tensor in tensors)
        span.output_bytes = self._log.bytes_of(tensors)
        span.outputs = self._log.known(tensors)

    def _taken_up(self, fqn: str) -> Span | None:
        if not self.frames and not self._replaying:  # an implementation of recomputation that is not torch's
            self.recomputed.add(fqn)
        if self._replaying:
            for span in self._replaying[-1]:
                if span.module == fqn:
                    return span
        spans = self._by_module[fqn]
        return spans[-1] if spans else None

    def _mark(self) -> None:
        self.mark(self.current)

    def mark(self, span: Span | None) -> None:
        """Autograd nodes that are made from now on are those of this run."""
        number = torch._C._autograd._get_sequence_nr()
        if self._numbers[-1] == number:
            self._number_spans[-1] = span
        else:
            self._numbers.append(number)
            self._number_spans.append(span)

    def _checkpoint_generator(self) -> Callable:
        original = torch.utils.checkpoint._checkpoint_without_reentrant_generator

        def generator(function: Callable, *args: Any, **kwargs: Any) -> Iterator[None]:
            checkpointed = Checkpointed(self.current)
            with self._first_run(checkpointed):
                yield from original(self._again(function, checkpointed), *args, **kwargs)

        return generator

    def _checkpoint_function(self) -> type:
        original, stack = torch.utils.checkpoint.CheckpointFunction, self

        class Watched(original):  # type: ignore[misc, valid-type]
            @classmethod
            def apply(cls, function: Callable, *args: Any) -> Any:
                checkpointed = Checkpointed(stack.current)
                again = stack._again(function, checkpointed)
                runs = itertools.count()

                def run(*inputs: Any) -> Any:
                    if next(runs):
                        return again(*inputs)
                    with stack._first_run(checkpointed):
                        return function(*inputs)

                return original.apply(run, *args)

        return Watched

    @contextmanager
    def _first_run(self, checkpointed: Checkpointed) -> Iterator[None]:
        checkpointed.start = len(self._log.forward)
        self._recording.append(checkpointed)
        try:
            yield
        finally:
            self._recording.remove(checkpointed)
            checkpointed.end = len(self._log.forward)

    def _again(self, function: Callable, checkpointed: Checkpointed) -> Callable:
        """``function`` as it runs in backward: inside the module that called it, with the spans of its first run."""

        def run(*args: Any, **kwargs: Any) -> Any:
            frames, self.frames = self.frames, [] if checkpointed.caller is None else [checkpointed.caller]
            self._replaying.append(iter(checkpointed.spans))
            self.recomputed.update(checkpointed.modules())
            self._mark()
            try:
                return function(*args, **kwargs)
            finally:
                self._replaying.pop()
                self.frames = frames
                self._mark()

        return run
