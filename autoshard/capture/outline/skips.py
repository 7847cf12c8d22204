"""Blocks that are alike, in a run of the forward that records no ops: what two of them did, the others do as well.

Used where a step is run again with other answers (``probe``). Which blocks are alike was found while the step was
traced; here a block is left out once two of its likes ran on arguments of the same form and layouts, were told answers
of the same turn, and did the same: modules, parameters, number of ops, questions, results. A block that changes an
argument, hands one on, gives a known value or draws from Python's random numbers runs each time.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.capture.fake import FakeMode, fake_tensor
from autoshard.capture.outline.arguments import Form, Layout, flatten, layouts, unflatten
from autoshard.capture.outline.fresh import empty
from autoshard.capture.outline.outliner import Alike, ValueDigests
from autoshard.capture.refusals import NotReplayable
from autoshard.capture.spans import ModuleStack, Span
from autoshard.capture.values import Values

TURNS = 6
"""Answers in turn come again after so many: every second one, every third one."""


@dataclass(slots=True)
class Count:
    """What a run has done so far.

    Attributes:
        read: keys of the parameters that were read.
        left: ops that it may still take.
        is_paused: what runs now is not the model's.
    """

    read: set[str]
    left: int
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class _Done:
    """What a block did, in the names of the first of its likes.

    Attributes:
        modules: FQNs in the order of their runs.
        params: keys of the parameters that were read.
        num_ops: ops that it took.
        num_asked: answers other than the usual ones that it got.
        asked: whose answers it asked for.
        form: of its result.
        results: layouts of the tensors in it.
    """

    modules: tuple[str, ...]
    params: frozenset[str]
    num_ops: int
    num_asked: int
    asked: int
    form: Form
    results: tuple[Layout, ...]


class Skips:
    """Decides at each call of a block, in the place of an ``Outliner``.

    Args:
        alike: by FQN, the first of its likes and what stands for what.
        stack: follows the modules.
        values: the known values, with the answers.
        count: what the run has done.
        mode: in which tensors are fake.
    """

    def __init__(
        self, alike: dict[str, Alike], stack: ModuleStack, values: Values, count: Count, mode: FakeMode
    ) -> None:
        self._alike, self._stack, self._values, self._count = alike, stack, values, count
        self._digest = ValueDigests(values)
        self._leaf = fake_tensor(mode, torch.empty(0, device="meta")).requires_grad_()
        self._seen: dict[tuple[Any, ...], tuple[str, _Done | None]] = {}
        self._sure: dict[tuple[Any, ...], _Done | None] = {}

    def may_replay(self, fqn: str) -> bool:
        """Worth asking for this module now."""
        return fqn in self._alike and torch._C._autograd._top_saved_tensors_default_hooks(False) is None

    def call(
        self, fqn: str, module: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Whether the call is done with, and its result."""
        alike, answers = self._alike[fqn], self._values.answers
        try:
            form, tensors = flatten((args, kwargs))
            given = layouts(tensors, self._digest)
        except NotReplayable:
            return False, None
        turn = answers.num_asked % TURNS if answers.way == "alternating" else 0
        is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        key = (alike.first, form, given, torch.is_grad_enabled(), is_cast, turn)
        if key in self._sure:
            done = self._sure[key]
            return (False, None) if done is None else (True, self._as_before(done, alike))
        result, done = self._watched(fqn, alike, run, args, kwargs, tensors)
        before = self._seen.setdefault(key, (fqn, done))
        if done is None or before[0] != fqn:
            self._sure[key] = done if done == before[1] else None
        return True, result

    def _as_before(self, done: _Done, alike: Alike) -> Any:
        count, answers = self._count, self._values.answers
        count.left -= done.num_ops
        count.read |= {alike.params[key] for key in done.params}
        answers.num_asked += done.num_asked
        answers.asked |= type(answers.asked)(done.asked)
        spans = [Span(alike.modules[fqn], None, 0) for fqn in done.modules]
        self._stack.replay(spans, [-1] * len(spans))
        if not done.results:
            return unflatten(done.form, ())
        count.is_paused = True
        try:
            return unflatten(done.form, _Results.apply(self._leaf, done.results))
        finally:
            count.is_paused = False

    def _watched(
        self,
        fqn: str,
        alike: Alike,
        run: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> tuple[Any, _Done | None]:
        """The result of a run, and what it did; ``None`` if it does more than that."""
        count, answers = self._count, self._values.answers
        num_spans, left, num_asked, asked, read = (
            len(self._stack.spans), count.left, answers.num_asked, answers.asked, count.read,
        )  # fmt: skip
        versions, drawn = [tensor._version for tensor in tensors], _drawn()
        count.read, answers.asked = set(), type(asked)(0)
        try:
            result = self._stack.run_block(fqn, run, args, kwargs)
        finally:
            own, own_asked = count.read, answers.asked
            count.read, answers.asked = read | own, asked | own_asked
        firsts = {name: first for first, name in alike.modules.items()}
        keys = {key: first for first, key in alike.params.items()}
        ran = [span.module for span in self._stack.spans[num_spans:]]
        is_changed = versions != [tensor._version for tensor in tensors] or drawn != _drawn()
        if is_changed or not firsts.keys() >= set(ran) or not keys.keys() >= own:
            return result, None
        try:
            form, made = flatten(result)
            results = layouts(made, self._digest)
        except NotReplayable:
            return result, None
        if not self._are_new(made, results, tensors):
            return result, None
        done = _Done(
            modules=tuple(firsts[name] for name in ran),
            params=frozenset(keys[key] for key in own),
            num_ops=left - count.left,
            num_asked=answers.num_asked - num_asked,
            asked=int(own_asked),
            form=form,
            results=tuple(replace(layout, is_view=False) for layout in results),
        )
        return result, done

    def _are_new(self, made: list[torch.Tensor], results: tuple[Layout, ...], given: list[torch.Tensor]) -> bool:
        """Each result is a tensor that fills a storage of its own and has no known value."""
        old = {tensor.untyped_storage()._cdata for tensor in given} | self._stack.log.param_keys.keys()
        storages = {tensor.untyped_storage()._cdata for tensor in made}
        is_whole = all(
            not layout.offset and layout.value is None and layout.nbytes == _span_bytes(layout) for layout in results
        )
        return is_whole and len(storages) == len(made) and storages.isdisjoint(old)


class _Results(torch.autograd.Function):
    """Fresh tensors that autograd follows as it would follow those of a block. Nobody asks for their gradients."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, results: tuple[Layout, ...]) -> tuple[torch.Tensor, ...]:
        """Tensors of these layouts."""
        made = tuple(empty(layout) for layout in results)
        pairs = zip(made, results, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, layout in pairs if not layout.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """A run of the forward alone has no backward."""
        raise NotImplementedError


def _span_bytes(layout: Layout) -> int:
    if 0 in layout.shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(layout.shape, layout.stride, strict=True))
    return (last + 1) * layout.dtype.itemsize


def _drawn() -> tuple[Any, ...]:
    """Where Python's and numpy's random numbers stand."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()[2:]
