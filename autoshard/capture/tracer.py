"""The dispatch mode that sees every op of the step and writes it down.

It stands above the fake tensor mode: each op is run on fake tensors (or answered from known values) and recorded with
the module that was running, the storages and parameters that it reads, the storages that it writes, its bytes and its
floating point operations.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.capture.fake import CPU
from autoshard.capture.flops import formula_of
from autoshard.capture.spans import NO_SEQUENCE, ModuleStack, Span
from autoshard.capture.storages import StorageLog
from autoshard.capture.values import COMPARISONS, DATA_DEPENDENT, MASKED, Values, is_masked
from autoshard.ir import LOSS, OpNode

aten = torch.ops.aten

READS_NO_DATA = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided", "sym_size", "sym_stride", "sym_numel", "is_same_size",
    "_has_compatible_shallow_copy_type",
}  # fmt: skip
"""Ops that take a tensor for its shape or dtype only."""
WRITES_NO_DATA = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
OVERWRITES = {
    "zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_",
}  # fmt: skip
"""Ops in place that do not read what they overwrite."""
PICKS_ROWS = {"embedding", "index", "index_select", "gather", "take", "_embedding_bag"}
"""Ops that read about as much of their first argument as they give back."""
RANDOM = {"native_dropout", "bernoulli", "bernoulli_", "alpha_dropout", "feature_dropout", "rrelu_with_noise"}
DROPOUT_POSITION = {
    "_scaled_dot_product_flash_attention": 3,
    "_scaled_dot_product_efficient_attention": 5,
    "_scaled_dot_product_attention_math": 4,
}
"""Where the attention ops have their rate of dropout."""

ONE_DTYPE = {"mm", "addmm", "mv", "addmv", "addbmm", "index_add", "index_add_", "index_copy", "index_copy_"}
"""Ops that refuse floating point tensors of different dtypes, which their fake versions do not."""
NORMS = {"native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm"}
"""Ops that refuse parameters of lower precision than their input, which their fake versions do not."""


class DtypeClash(RuntimeError):
    """An op that would refuse its tensors' dtypes if they had data."""


class _Facts:
    """What is known of an op before it runs."""

    __slots__ = (
        "formula",
        "is_pick",
        "is_strict",
        "is_view",
        "name",
        "overwrites",
        "reads_data",
        "target",
        "writes",
        "writes_data",
    )

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self.name, self.target = func._opname, str(func)
        arguments = func._schema.arguments
        self.is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)
        self.writes = [
            (i, None if a.kwarg_only else i, a.name)
            for i, a in enumerate(arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.reads_data = self.name not in READS_NO_DATA
        self.writes_data = self.name not in WRITES_NO_DATA
        self.overwrites = self.name in OVERWRITES
        self.is_strict = self.name in ONE_DTYPE or self.name in NORMS
        self.is_pick = self.name in PICKS_ROWS
        self.formula = formula_of(func)

    def written(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments that the op writes to."""
        found: list[torch.Tensor] = []
        for _, position, name in self.writes:
            value = args[position] if position is not None and position < len(args) else kwargs.get(name)
            _collect((value,), found)
        return found


_FACTS: dict[torch._ops.OpOverload, _Facts] = {}


class Tracer(TorchDispatchMode):
    """Writes down every op.

    Attributes:
        readers: by parameter, the stacks of modules during which an op consumed it, in the order of the first.
        written: keys of the parameters that the forward wrote to.
        drops: FQNs of the modules that ran an op with random dropout.
    """

    def __init__(self, log: StorageLog, stack: ModuleStack, values: Values) -> None:
        super().__init__()
        self._log, self._stack, self._values = log, stack, values
        self._last_backward: Span | None = None
        self._stack_of: dict[int, tuple[str, ...]] = {}
        self.readers: dict[str, dict[tuple[str, ...], None]] = defaultdict(dict)
        self.written: set[str] = set()
        self.drops: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as for FakeMode

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one op and record it."""
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": CPU}
        facts = _FACTS.get(func)
        if facts is None:
            facts = _FACTS[func] = _Facts(func)
        span, is_recompute = self._place()
        module = span.module if span is not None else LOSS
        if func is aten._local_scalar_dense.default:
            return self._values.scalar(args[0], module)
        if func in COMPARISONS:
            return self._values.agree(func, args, kwargs, module)
        tensors: list[torch.Tensor] = []
        _collect(args, tensors)
        if kwargs:
            _collect(kwargs.values(), tensors)
        if facts.is_strict:
            _require_one_dtype(facts.name, tensors)
        out = self._execute(func, facts, args, kwargs, tensors, module)
        self._record(facts, args, kwargs, tensors, out, span, module, is_recompute)
        return out

    def _place(self) -> tuple[Span | None, bool]:
        """The run of a module to which the op belongs, and whether it computes forward code again."""
        if self._log.phase == "forward":
            return self._stack.current, False
        if self._stack.is_recomputing:
            self._last_backward = self._stack.current
            return self._last_backward, True
        node = torch._C._current_autograd_node()
        number = NO_SEQUENCE if node is None else node._sequence_nr()
        if number < NO_SEQUENCE:  # else a gradient is accumulated: it belongs to what was just computed
            self._last_backward = self._stack.span_of(number)
        return self._last_backward, False

    def _execute(
        self,
        func: torch._ops.OpOverload,
        facts: _Facts,
        args: tuple,
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        module: str,
    ) -> Any:
        values = self._values
        known = values.evaluate(func, args, kwargs) if values.may_know(func, tensors) else None
        if func in DATA_DEPENDENT:
            if known is None:
                return values.concretised(func, args, kwargs, module)
            out = torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda value: args[0].new_empty(tuple(value.shape), dtype=value.dtype), known
            )
        elif func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            half = [part.to(torch.bfloat16) for part in args[:2]]  # the fake kernel knows no other dtype
            out = func(*half, *args[2:], **kwargs).to(args[0].dtype)
        elif func in MASKED and is_masked(args):
            out = func(*values.mask_to_indices(args, module), **kwargs)
        else:
            out = func(*args, **kwargs)
        if known is not None:
            values.keep(out, known)
        else:
            for tensor in facts.written(args, kwargs) if facts.writes else ():
                values.forget(tensor)
            values.keep_assumed_results(func, out)
        return out

    def _record(
        self,
        facts: _Facts,
        args: tuple,
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        out: Any,
        span: Span | None,
        module: str,
        is_recompute: bool,
    ) -> None:
        log = self._log
        written: list[torch.Tensor] = facts.written(args, kwargs) if facts.writes else []
        made: list[torch.Tensor] = []
        _collect(out if isinstance(out, tuple | list) else (out,), made)

        inputs: dict[int, None] = {}
        params: dict[str, None] = {}
        seen: set[int] = set()
        bytes_read = 0
        out_bytes = sum(_nbytes(tensor) for tensor in made)
        for position, tensor in enumerate(tensors):
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            cdata = storage._cdata
            key = log.param_keys.get(cdata)
            if key is not None:
                params[key] = None
            else:
                number = log.known_index(storage)
                inputs[number] = None
                if log.phase == "forward" and tensor.requires_grad:
                    _note_escape(log.records[number].span, number)
            if cdata in seen or not facts.reads_data or (facts.overwrites and position == 0):
                continue
            seen.add(cdata)
            size = _nbytes(tensor)
            bytes_read += min(size, out_bytes) if facts.is_pick and position == 0 else size

        outputs: dict[int, None] = {}
        bytes_written = 0
        is_view = facts.is_view
        if not is_view and not written and made:
            is_view = all(t.layout is torch.strided and t.untyped_storage()._cdata in seen for t in made)
        if not is_view:
            for tensor in (*written, *made):
                if tensor.layout is not torch.strided:
                    continue
                storage = tensor.untyped_storage()
                key = log.param_keys.get(storage._cdata)
                if key is not None:
                    if log.phase == "forward":
                        self.written.add(key)
                    continue
                number = log.index(storage, span)
                if number not in outputs:
                    outputs[number] = None
                    bytes_written += _nbytes(tensor) if facts.writes_data else 0
        else:
            bytes_read = 0
            for tensor in made:
                if tensor.layout is torch.strided and not log.is_known(tensor.untyped_storage()):
                    outputs[log.index(tensor.untyped_storage(), span)] = None  # a constant that was made just now
        if params and not is_view and facts.reads_data and (log.phase == "forward" or is_recompute):
            where = span.stack() if span is not None else (LOSS,)
            for key in params:
                self.readers[key].setdefault(where)
        if log.phase == "backward" and span is not None:
            span.touch_backward(len(log.ops))
        self._note_dropout(facts, args, module)
        log.ops.append(
            OpNode(
                target=facts.target,
                module=module,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                params=tuple(params),
                flops=facts.formula(args, kwargs, out) if facts.formula is not None else 0,
                bytes_read=bytes_read,
                bytes_written=bytes_written,
                is_view=is_view,
                is_recompute=is_recompute,
            )
        )

    def _note_dropout(self, facts: _Facts, args: tuple, module: str) -> None:
        if facts.name in RANDOM:
            self.drops.add(module)
        elif facts.name in DROPOUT_POSITION:
            position = DROPOUT_POSITION[facts.name]
            if len(args) > position and args[position]:
                self.drops.add(module)


def _note_escape(span: Span | None, number: int) -> None:
    """A tensor is used: each ended run in which it was made must have handed it out where FSDP2 sees it."""
    while span is not None and not span.is_open:
        if number not in span.outputs:
            span.escapes = True
        span = span.parent


def _require_one_dtype(op: str, tensors: list[torch.Tensor]) -> None:
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors if tensor.is_floating_point()))
    if len(dtypes) < 2 or (op in NORMS and dtypes[0].itemsize <= dtypes[1].itemsize):
        return
    raise DtypeClash(f"{op} takes tensors of one dtype, got {' and '.join(map(str, dtypes))}")


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Add the tensors among values and in the lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes that the elements of a tensor take, an expanded one counted once."""
    if tensor.layout is not torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
