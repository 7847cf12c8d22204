"""One training step on fake tensors: forward, loss, backward.

The model keeps its own mode: what the user has put into evaluation mode stays there as long as the root trains. The
outputs are let go after the loss, as trainers do, so that only what autograd saved lives on.
"""

import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.capture.answers import Origin
from autoshard.capture.attention import TargetFunctions
from autoshard.capture.dtype_reads import DtypeReads
from autoshard.capture.fake import FakeMode, FakeModel
from autoshard.capture.gpu_only import CODE, remedy_without_gpu
from autoshard.capture.inputs import Pair, fake_pair
from autoshard.capture.libraries import as_in_training
from autoshard.capture.loss import find_loss
from autoshard.capture.ops import DtypeClash
from autoshard.capture.outline import Outlines, make_outliner
from autoshard.capture.probe import Way, watching_python
from autoshard.capture.quiet import quiet_machine
from autoshard.capture.spans import FAILED, ModuleStack, Span
from autoshard.capture.storages import StorageLog
from autoshard.capture.surroundings import left_over
from autoshard.capture.tracer import Tracer
from autoshard.capture.tree import ModuleTree
from autoshard.capture.values import Values, may_keep
from autoshard.errors import AutoshardError, CaptureError
from autoshard.ir import DtypeRead, ModuleSpan, OpNode, Region, StorageInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What one step showed.

    Attributes:
        region: the root region.
        loss: how the loss was found.
        num_calls: hooked forwards by module.
        readers: stacks by parameter.
        trained: keys of the parameters that got a gradient.
        sparse: keys of those whose gradient is sparse.
        written: keys of the parameters that the forward wrote to.
        kept_in: by parameter, the places where second references to it are kept.
        read_by_alias: by parameter that the step read through a second reference, where that is kept.
        traits: traits that showed, by module.
        assumed: (module, op, assumption) of the data-dependent ops.
        way: the modules that ran and the parameters that were read.
        asked: whose answers, which another rank may get otherwise, the forward asked for.
        draws_in_python: it drew Python's or numpy's global random numbers.
        kept: places outside the model that still hold tensors of the step.
    """

    region: Region
    loss: str
    num_calls: dict[str, int]
    readers: dict[str, tuple[tuple[str, ...], ...]]
    trained: frozenset[str]
    sparse: frozenset[str]
    written: frozenset[str]
    kept_in: dict[str, tuple[str, ...]]
    read_by_alias: dict[str, str]
    traits: dict[str, frozenset[str]]
    assumed: tuple[tuple[str, str, str], ...]
    way: Way
    asked: Origin
    draws_in_python: bool
    kept: tuple[str, ...] = ()


def trace_step(
    model: nn.Module,
    tree: ModuleTree,
    pair: Pair,
    *,
    loss: Callable[[Any], Any] | None,
    entry: str,
    dtype: torch.dtype | None,
    device_kind: str,
    outlines: Outlines | None = None,
) -> Traced:
    """Run one step of the model on fake tensors and record it; the model is left as it was.

    Args:
        model: the root.
        tree: its tree.
        pair: arguments of the entry.
        loss: function of the outputs.
        entry: the root's method to run.
        dtype: dtype of floating point parameters and inputs, ``None`` as they are.
        device_kind: ``cuda`` or ``cpu``.
        outlines: what is known of the model's blocks; ``None`` runs every block.

    Raises:
        NotAsOutlined: blocks of one form cannot be replayed; nothing was found out about the step.
        NotInOutline: a parameter of a replayed block is read outside.
        CaptureError: the forward, the loss or the backward failed.
    """
    mode = FakeMode()
    log, values = StorageLog(), Values()
    stack = ModuleStack(tree, log)
    tracer = Tracer(log, stack, values)
    dtype_reads = DtypeReads(tree, stack, log, dtype)
    with quiet_machine(), FakeModel(tree, mode, dtype) as fake:
        (args, kwargs), given = fake_pair(pair, mode, values, dtype)
        _introduce(log, values, tree, fake, given)
        if not model.training:
            model.train()
        if outlines is not None and not outlines.off_reason:
            stack.outliner = make_outliner(outlines, mode, stack, tracer, values, fake)
        with (
            torch.enable_grad(),
            as_in_training(),
            torch.compiler.set_stance("force_eager"),
            watching_python(values.answers),
            stack.watching(),
            mode,
            TargetFunctions(device_kind, values, dtype_reads),
            tracer,
            _errors(stack, log),
        ):
            how = _run(model, stack, log, args, kwargs, loss, entry)
        stack.outliner = None  # it refers to all that refers to it, and would keep the fake tensors alive
        grads = {key: param.grad for key, param in fake.params.items() if param.grad is not None}
        found = {key: log.gradient(grad) for key, grad in grads.items()} | log.replayed_grads
        storages = log.finish({key: found[key] for key in tree.params if key in found})
        replaced = {key for key, param in fake.params.items() if not _is_in_place(key, param, log)}
        result = Traced(
            region=_region(log, stack, storages, dtype_reads.reads()),
            loss=how,
            num_calls=dict(stack.num_calls),
            readers={key: tuple(stacks) for key, stacks in tracer.readers.items()},
            trained=frozenset(found),
            sparse=frozenset(key for key, grad in grads.items() if grad.layout is not torch.strided)
            | log.replayed_sparse,
            written=frozenset(tracer.written | replaced),
            kept_in=_places(fake),
            read_by_alias=tracer.read_by_alias,
            traits=_traits(stack, tracer),
            assumed=tuple(values.assumed),
            way=Way(tuple(span.module for span in stack.spans), frozenset(tracer.readers)),
            asked=values.answers.asked,
            draws_in_python=values.answers.draws_in_python,
        )
        del grads
        twins = _let_go(fake)
    # From here on a tensor of the step lives only where somebody else keeps it.
    del args, kwargs, given, fake, values, tracer, stack, dtype_reads
    if log.has_left_over() or any(twin() is not None for twin in twins):
        result = replace(result, kept=left_over(mode))
    return result


def _introduce(log: StorageLog, values: Values, tree: ModuleTree, fake: FakeModel, given: list[torch.Tensor]) -> None:
    """Tell the log what is there before the step, and the values of it that are known."""
    for key, param in fake.params.items():
        log.add_param(key, param)
        log.add_real(key, tree.params[key].param, param)
    for alias, stand_in in fake.aliases:
        if stand_in is not alias.tensor:
            log.add_alias(alias.key, alias.place, stand_in)
    for twin, original in fake.buffers:
        log.add_given(twin, "buffer")
        if may_keep(original) and original.device.type == "cpu":
            values.set(twin, original.detach().clone())
    for tensor in given:
        log.add_given(tensor, "input")


def _let_go(fake: FakeModel) -> list[weakref.ref]:
    """Drop the gradients; what tells whether a parameter's twin is still alive."""
    for param in fake.params.values():
        param.grad = None
    return [weakref.ref(param) for param in fake.params.values()]


def _run(
    model: nn.Module,
    stack: ModuleStack,
    log: StorageLog,
    args: tuple,
    kwargs: dict[str, Any],
    loss: Callable[[Any], Any] | None,
    entry: str,
) -> str:
    outputs = model(*args, **kwargs) if entry == "forward" else stack.run_entry(getattr(model, entry), args, kwargs)
    scalar, how = find_loss(outputs, loss)
    del outputs
    log.begin_backward()
    scalar.backward()
    log.keep(scalar)
    return how


@contextmanager
def _errors(stack: ModuleStack, log: StorageLog) -> Iterator[None]:
    """Whatever goes wrong in the user's code is a ``CaptureError`` that says where."""
    try:
        yield
    except AutoshardError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if last.filename.startswith(_OWN) and last.name not in _PASSES_ON and not isinstance(error, DtypeClash):
            raise  # a bug of this package, not of the user's
        fqn = getattr(error, FAILED, None)
        where = fqn or "(root)"
        reason = f"{type(error).__name__}: {error}{_user_line(error)}"
        needs_gpu = remedy_without_gpu(error)
        if needs_gpu is not None:
            raise CaptureError(
                where, f"{reason}; {CODE}: {needs_gpu[0]}, and there is none here", needs_gpu[1]
            ) from error
        if log.phase == "backward":
            raise CaptureError(
                where, f"the backward failed: {reason}", "check that loss.backward() works on a real batch"
            ) from error
        if stack.num_calls and fqn is None:
            raise CaptureError(
                "(root)", f"the loss failed: {reason}", "check that loss(outputs) takes what the model returns"
            ) from error
        raise CaptureError(
            where, reason, "check that the model runs one step on these example inputs, in training mode, on real data"
        ) from error


_PASSES_ON = {"__torch_function__", "_execute", "_run", "run", "call", "_given", "<lambda>"}
"""Functions of this package that call the user's code or torch on the user's behalf."""
_OWN = str(Path(__file__).parent)
_NOT_USERS = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))


def _user_line(error: BaseException) -> str:
    """The deepest line of the traceback that is the user's own, or else a library's that is not torch's."""
    frames = [
        frame
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not frame.filename.startswith((*_NOT_USERS, "<"))
    ]
    own = [frame for frame in frames if "site-packages" not in Path(frame.filename).parts]
    for frame in own or frames:
        return f" ({frame.filename}:{frame.lineno})"
    return ""


def _places(fake: FakeModel) -> dict[str, tuple[str, ...]]:
    places: dict[str, list[str]] = {}
    for alias, _ in fake.aliases:
        places.setdefault(alias.key, []).append(alias.place)
    return {key: tuple(found) for key, found in places.items()}


def _is_in_place(key: str, param: torch.Tensor, log: StorageLog) -> bool:
    return log.param_keys.get(param.untyped_storage()._cdata) == key


def _traits(stack: ModuleStack, tracer: Tracer) -> dict[str, frozenset[str]]:
    traits: dict[str, set[str]] = {}
    for trait, modules in (("checkpointed", stack.recomputed), ("dropout", tracer.drops)):
        for module in modules:
            traits.setdefault(module, set()).add(trait)
    return {module: frozenset(found) for module, found in traits.items()}


def _region(
    log: StorageLog, stack: ModuleStack, storages: tuple[StorageInfo, ...], dtype_reads: tuple[DtypeRead, ...]
) -> Region:
    for index, (op, made_by) in enumerate(zip(log.backward, log.backward_spans, strict=True)):
        if made_by is not None and op.params and not op.is_view and not op.is_recompute:
            for key in op.params:
                made_by.read_in_backward(key, index)
    for span in reversed(stack.spans):  # inner spans come later
        if span.parent is not None and span.backward_start is not None:
            span.parent.touch_backward(span.backward_start)
            span.parent.backward_end = max(span.parent.backward_end, span.backward_end)
            for key, index in span.param_reads.items():
                span.parent.read_in_backward(key, index)
    forward: tuple[OpNode, ...] = tuple(log.forward)
    return Region(
        name="root",
        module="",
        forward=forward,
        backward=tuple(log.backward),
        storages=storages,
        spans=tuple(_span_info(span) for span in stack.spans),
        dtype_reads=dtype_reads,
    )


def _span_info(span: Span) -> ModuleSpan:
    kind = f"opaque:{span.opaque}" if span.opaque and span.escapes else span.output_kind
    return ModuleSpan(
        module=span.module,
        forward=(span.forward_start, span.forward_end),
        backward=None if span.backward_start is None else (span.backward_start, span.backward_end),
        inputs_need_grad=span.inputs_need_grad,
        output_needs_grad=span.output_needs_grad,
        output_kind=kind,
        output_is_view=span.output_is_view,
        input_bytes=span.input_bytes,
        output_bytes=span.output_bytes,
        escapes=span.escapes,
        changes_input=span.changes_input,
        early_params=span.early_params(),
    )
