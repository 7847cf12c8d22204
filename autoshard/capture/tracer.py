"""The dispatch mode that sees every op of the step and writes it down.

It stands above the fake tensor mode: each op is run on fake tensors (or answered from known values) and recorded with
the module that was running, the storages and parameters that it reads, the storages that it writes, its bytes and its
floating point operations.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from autoshard.capture.ops import ANSWERED, OpFacts, collect_tensors, facts_of, run_op, tensors_of
from autoshard.capture.refusals import NotInOutline
from autoshard.capture.spans import ModuleStack, Span, note_escape
from autoshard.capture.storages import StorageLog
from autoshard.capture.values import Values
from autoshard.errors import CaptureError
from autoshard.ir import LOSS, OpNode

RANDOM = {"native_dropout", "bernoulli", "bernoulli_", "alpha_dropout", "feature_dropout", "rrelu_with_noise"}
DROPOUT_POSITION = {
    "_scaled_dot_product_flash_attention": 3,
    "_scaled_dot_product_efficient_attention": 5,
    "_scaled_dot_product_attention_math": 4,
}
"""Where the attention ops have their rate of dropout."""


UNKNOWN_PLACE = "a reference that is kept elsewhere (a closure, a global name, another object)"


class Tracer(TorchDispatchMode):
    """Writes down every op.

    Attributes:
        readers: by parameter, the stacks of modules during which an op consumed it, in the order of the first.
        written: keys of the parameters that the forward wrote to.
        drops: FQNs of the modules that ran an op with random dropout.
        read_by_alias: by parameter that an op read through a second reference, where that is kept.
        last_module: FQN of the module of the last op.
    """

    def __init__(self, log: StorageLog, stack: ModuleStack, values: Values) -> None:
        super().__init__()
        self._log, self._stack, self._values = log, stack, values
        self._is_paused = False
        self.readers: dict[str, dict[tuple[str, ...], None]] = defaultdict(dict)
        self.written: set[str] = set()
        self.drops: set[str] = set()
        self.read_by_alias: dict[str, str] = {}
        self.last_module = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as for FakeMode

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one op and record it."""
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ops in here are run and not recorded."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Ops in here are recorded although the tracer pauses around them."""
        before, self._is_paused = self._is_paused, False
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def apart(self, log: StorageLog) -> Iterator[None]:
        """Ops in here are recorded in ``log``, and what is found out about them is kept apart too."""
        fresh = vars(Tracer(log, self._stack, self._values))
        names = fresh.keys() - vars(TorchDispatchMode()).keys()
        kept = {name: getattr(self, name) for name in names}
        vars(self).update({name: fresh[name] for name in names})
        try:
            yield
        finally:
            vars(self).update(kept)

    def _dispatch(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func.namespace == "prim":
            return func(*args, **kwargs)
        span, is_recompute = self._stack.place()
        module = self.last_module = span.module if span is not None else LOSS
        tensors = tensors_of(args, kwargs)
        if any(type(tensor) is nn.Parameter and id(tensor) in self._log.twins for tensor in tensors):
            args, kwargs = tree_map_only(nn.Parameter, self._twin_of, (args, kwargs))
            tensors = tensors_of(args, kwargs)
        out = run_op(func, args, kwargs, self._values, module)
        if func not in ANSWERED:
            self._record(facts_of(func), args, kwargs, tensors, out, span, module, is_recompute)
        return out

    def _twin_of(self, param: nn.Parameter) -> torch.Tensor:
        """What stands for a parameter of the model that an op was given as it is."""
        if id(param) not in self._log.twins:
            return param
        key, twin = self._log.twins[id(param)]
        if param.is_meta and param.requires_grad:  # autograd takes no gradient of another device
            raise CaptureError(
                self.last_module or "(root)",
                f"AS221: it reads the parameter {key} through {UNKNOWN_PLACE}; once the model is sharded, that is the "
                "old whole tensor, which is never trained",
                "read the parameter as an attribute of the module that registers it",
            )
        self.read_by_alias.setdefault(key, UNKNOWN_PLACE)
        return twin

    def _record(
        self,
        facts: OpFacts,
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
        collect_tensors(out if isinstance(out, tuple | list) else (out,), made)

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
                if cdata in log.alias_places and facts.reads_data and not facts.is_view:
                    self.read_by_alias[key] = log.alias_places[cdata]
                if key in log.replayed_params:
                    raise NotInOutline(key)
            else:
                number = log.known_index(storage)
                inputs[number] = None
                if log.phase == "forward" and tensor.requires_grad:
                    note_escape(log.records[number].span, number)
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
            for position, tensor in enumerate((*written, *made)):
                if tensor.layout is not torch.strided:
                    continue
                storage = tensor.untyped_storage()
                key = log.param_keys.get(storage._cdata)
                if key is not None:
                    if log.phase == "forward":
                        self.written.add(key)
                    continue
                number = log.index(storage, span)
                if position < len(written) and log.phase == "forward" and torch.is_grad_enabled():
                    self._stack.note_change(number)
                if number not in outputs:
                    outputs[number] = None
                    bytes_written += _nbytes(tensor) if facts.writes_data else 0
        else:
            bytes_read = 0
            for tensor in made:
                if tensor.layout is torch.strided and not log.is_known(tensor.untyped_storage()):
                    outputs[log.index(tensor.untyped_storage(), span)] = None  # a constant that was made just now
        if params and not is_view and facts.needs_whole:
            where = span.stack() if span is not None else (LOSS,)
            if log.phase == "forward" or is_recompute:
                for key in params:
                    self.readers[key].setdefault(where)
            else:
                self._note_backward_reads(params, where)
        if log.phase == "backward":
            log.backward_spans.append(span)
            if span is not None:
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

    def _note_backward_reads(self, params: Iterable[str], where: tuple[str, ...]) -> None:
        """Most are of what the forward read there; the others (a hook on a tensor reads it) count as readers."""
        for key in params:
            if not any(stack[-1] in where for stack in self.readers[key]):
                self.readers[key].setdefault(where)

    def _note_dropout(self, facts: OpFacts, args: tuple, module: str) -> None:
        if facts.name in RANDOM:
            self.drops.add(module)
        elif facts.name in DROPOUT_POSITION:
            position = DROPOUT_POSITION[facts.name]
            if len(args) > position and args[position]:
                self.drops.add(module)


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes that the elements of a tensor take, an expanded one counted once."""
    if tensor.layout is not torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
