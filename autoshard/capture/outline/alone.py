"""One block traced alone, through forward and backward, on fresh tensors of the layouts that it gets.

Alone, everything that holds on to memory is the block's own: a storage that dies in its backward was kept by it, one
that is alive at the end has leaked into an object somewhere (a cache, a list of auxiliary losses, a hook's capture),
and such a block is not replayed. What each node of the block gives to the gradient of an argument is taken off the
node itself, before autograd adds it up, so that a replay can hand it to the real graph one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autoshard.capture.fake import FakeModel
from autoshard.capture.outline.arguments import Form, Layout, flatten, layouts, unflatten
from autoshard.capture.outline.effects import unchanged
from autoshard.capture.outline.fresh import Border, alias, empty
from autoshard.capture.outline.pairing import own_tensors, submodules
from autoshard.capture.outline.places import Places
from autoshard.capture.outline.recording import Event, Piece, Recording, Result, Role
from autoshard.capture.refusals import NotReplayable, ReadsItsPlace
from autoshard.capture.spans import ModuleStack, Span, note_escape
from autoshard.capture.storages import ALIVE, StorageLog
from autoshard.capture.values import KnownValue, Values

if TYPE_CHECKING:
    from autoshard.capture.tracer import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What traces the step; a recording borrows it.

    Attributes:
        stack: follows the modules.
        tracer: writes down the ops.
        values: the known values.
        fake: the model's fake tensors.
        leaf: a tensor that requires a gradient and that nothing reads.
        digest: of the known value of a tensor, ``None`` if it has none.
        places: hides attributes that say only where a module stands.
    """

    stack: ModuleStack
    tracer: "Tracer"
    values: Values
    fake: FakeModel
    leaf: torch.Tensor
    digest: Callable[[torch.Tensor], Any]
    places: Places


def record(
    machine: Machine,
    fqn: str,
    module: nn.Module,
    run: Callable[..., Any],
    form: Form,
    given: Sequence[Layout],
    known: Sequence[KnownValue | None],
    incoming: Sequence[Layout] | None,
) -> Recording:
    """Trace a block alone.

    Args:
        machine: what traces.
        fqn: the block.
        module: the block.
        run: its hooked call.
        form: of ``(args, kwargs)``.
        given: layouts of the tensors in them.
        known: their known values.
        incoming: layouts of the gradients of its results, ``None`` for those of the results themselves.

    Raises:
        ReadsItsPlace: the result depends on where the block stands, as far as can be seen.
        NotReplayable: the block does more than make its result.
    """
    with _apart(machine) as log, machine.places.hidden(module) as reads, unchanged(module, machine.values):
        made = _Block(machine, log, fqn, module)
        made.forward(run, form, given, known)
        made.backward(incoming)
        found = made.recording()
    if reads:
        raise ReadsItsPlace(f"its forward reads {', '.join(sorted(reads))}, which tells one block from another")
    return found


class _Block:
    """One recording while it is made."""

    def __init__(self, machine: Machine, log: StorageLog, fqn: str, module: nn.Module) -> None:
        self._machine, self._log, self._fqn = machine, log, fqn
        self._roles: dict[int, tuple[Role, int]] = {}
        self._grad_enabled = torch.is_grad_enabled()
        self._keys = {key for part in submodules(module) for key in machine.stack.tree.keys_on(part)}
        for place, tensor in enumerate(own_tensors(module)):
            if tensor.untyped_storage()._cdata not in log.param_keys and not log.is_known(tensor.untyped_storage()):
                self._roles[log.add_given(tensor, "buffer")] = ("buffer", place)
        self._events: list[tuple[int, Span | None, tuple[tuple[int, int, Layout], ...]]] = []
        self._outs: list[torch.Tensor] = []
        self._edges: dict[tuple[Any, int], int] = {}
        self._results: tuple[Result, ...] = ()
        self._leaving: tuple[int, ...] = ()
        self._incoming: tuple[Layout, ...] = ()

    def forward(
        self, run: Callable[..., Any], form: Form, given: Sequence[Layout], known: Sequence[KnownValue | None]
    ) -> None:
        arguments = self._arguments(given, known)
        versions = [tensor._version for tensor in arguments]
        taken = unflatten(form, arguments)
        result = self._machine.stack.run_block(self._fqn, run, *taken)
        after, left = flatten(taken)
        if after != form or any(one is not other for one, other in zip(left, arguments, strict=True)):
            raise NotReplayable("it changes its arguments")
        if any(tensor._version != version for tensor, version in zip(arguments, versions, strict=True)):
            raise NotReplayable("it writes to its arguments")
        self._form, outs = flatten(result)
        del result, taken, left
        self._read_results(outs, arguments)
        if self._grad_enabled:
            self._edges = {(t.grad_fn, t.output_nr): i for i, t in reversed([*enumerate(arguments)]) if t.requires_grad}
        self._outs = [outs[number] for number in self._leaving]
        log = self._log
        self._used = tuple(
            {
                number: None
                for number in (log.number_of(tensor) for tensor in arguments if tensor.requires_grad)
                if number is not None and any(number in op.inputs for op in log.forward)
            }
        )
        del arguments
        owned = {result.number for result in self._results if result.source == "storage"}
        alive = [number for number in range(len(log.records)) if log.records[number].died_phase == ALIVE]
        del outs
        if not self._outs:
            before = set(alive)
        else:
            before = {number for number in alive if number not in owned}
            _watch_nodes(self._outs, self._edges, self._note_given, self._allowed())
            with self._machine.tracer.paused():
                self._root = Seed.apply(self, *self._outs)
            self._outs = []
        held = {n for n in before - owned if log.records[n].died_phase != ALIVE and n not in self._roles}
        if held:
            raise NotReplayable("its result holds on to more than the tensors in it")
        self._foreign()

    def backward(self, incoming: Sequence[Layout] | None) -> None:
        self._log.begin_backward()
        if not self._leaving:
            return
        mine = tuple(self._results[number].layout for number in self._leaving)
        self._incoming = tuple(incoming) if incoming is not None else _like(mine)
        with self._machine.tracer.paused():
            one = torch.empty((), dtype=torch.float32)
        self._root.backward(one)
        del self._root

    def gradients(self) -> list[torch.Tensor]:
        """Fresh gradients for the results, which nothing else holds."""
        bases: dict[int, torch.Tensor] = {}
        made = []
        for layout in self._incoming:
            base = bases.get(layout.storage)
            if base is None:
                base = bases[layout.storage] = empty(layout)
                self._roles[self._log.add_given(base, "input")] = ("gradient", layout.storage)
            made.append(alias(base, layout))
        return made

    def recording(self) -> Recording:
        machine, log, stack = self._machine, self._log, self._machine.stack
        own = {key: machine.fake.params[key] for key in sorted(self._keys) if key in machine.fake.params}
        grads = {key: param.grad for key, param in own.items() if param.grad is not None}
        found = {key: log.gradient(grad) for key, grad in grads.items()} | log.replayed_grads
        numbers = {gradient.number for gradient in found.values()}
        log.is_closed = True
        sparse = {key for key, grad in grads.items() if grad.layout is not torch.strided}
        del grads
        for param in own.values():
            param.grad = None
        if machine.tracer.read_by_alias:
            raise NotReplayable("it reads a parameter through a second reference")
        read = (*machine.tracer.readers, *(key for op in (*log.forward, *log.backward) for key in op.params))
        if not self._keys.issuperset(read):
            raise NotReplayable("it reads a parameter of a module outside")
        for number, record in enumerate(log.records):
            if record.died_phase == ALIVE and number not in self._roles and number not in numbers:
                raise NotReplayable("it leaves a tensor behind, in an attribute, a list or another object")
            if record.died_phase == ALIVE and self._roles.get(number, ("own", 0))[0] in ("argument", "gradient"):
                raise NotReplayable("it keeps an argument or a gradient")
        index = {id(span): number for number, span in enumerate(stack.spans)}
        return Recording(
            fqn=self._fqn,
            forward=tuple(log.forward),
            backward=tuple(log.backward),
            backward_spans=tuple(index.get(id(span), -1) for span in log.backward_spans),
            pieces=tuple(
                Piece(r.nbytes, r.kind, r.born_phase, r.born, r.died_phase, r.died, *self._roles.get(n, ("own", 0)))
                for n, r in enumerate(log.records)
            ),
            spans=tuple(stack.spans),
            parents=tuple(-1 if span.parent is None else index[id(span.parent)] for span in stack.spans),
            makers={n: index[id(r.span)] for n, r in enumerate(log.records) if id(r.span) in index},
            form=self._form,
            results=self._results,
            leaving=self._leaving,
            incoming=self._incoming,
            used=self._used,
            events=tuple(Event(at, index.get(id(span), -1), parts) for at, span, parts in self._events),
            grads=found,
            sparse=frozenset(sparse | log.replayed_sparse),
            readers={key: tuple(stacks) for key, stacks in machine.tracer.readers.items()},
            written=tuple(sorted(machine.tracer.written)),
            written_tensors=tuple(
                sorted(
                    {
                        self._roles[n][1]
                        for op in (*log.forward, *log.backward)
                        for n in op.outputs
                        if self._roles.get(n, ("own", 0))[0] == "buffer" and not op.is_view
                    }
                )
            ),
            drops=tuple(sorted(machine.tracer.drops)),
            recomputed=tuple(sorted(stack.recomputed)),
            assumed=tuple(machine.values.assumed),
            params=tuple(dict.fromkeys((*read, *sorted(log.replayed_params)))),
            modules=tuple(sorted(log.replayed_modules)),
        )

    def _arguments(self, given: Sequence[Layout], known: Sequence[KnownValue | None]) -> list[torch.Tensor]:
        """Fresh tensors of these layouts; those that require a gradient come out of a node of their own."""
        bases: dict[int, torch.Tensor] = {}
        made: list[torch.Tensor] = []
        with self._machine.tracer.paused(), torch.enable_grad():
            for number, layout in enumerate(given):
                if layout.twin != number:
                    made.append(made[layout.twin])
                    continue
                base = bases.get(layout.storage)
                if base is None:
                    base = Border.apply(self._machine.leaf, layout) if layout.requires_grad else empty(layout)
                    bases[layout.storage] = base
                    self._roles[self._log.add_given(base, "input")] = ("argument", layout.storage)
                if base.requires_grad != layout.requires_grad or base.dtype != layout.dtype:
                    raise NotReplayable("two of its arguments share memory and are of different kinds")
                tensor = alias(base, layout, as_view=layout.is_view)
                value = known[number]
                if value is not None:
                    self._machine.values.set(tensor, *value)
                made.append(tensor)
        return made

    def _read_results(self, outs: list[torch.Tensor], arguments: list[torch.Tensor]) -> None:
        log, found, leaving = self._log, [], []
        places = {id(tensor): number for number, tensor in reversed([*enumerate(arguments)])}
        for number, (tensor, layout) in enumerate(zip(outs, layouts(outs, self._machine.digest), strict=True)):
            if id(tensor) in places:
                found.append(Result("argument", places[id(tensor)], layout, None))
                continue
            storage = log.number_of(tensor)
            if storage is None:
                raise NotReplayable("it returns a parameter")
            role = self._roles.get(storage, ("own", 0))[0]
            if role != "own" and tensor.requires_grad:
                raise NotReplayable("it returns a view of an argument or a buffer")
            if log.records[storage].kind == "input" and role == "own":
                raise NotReplayable("it returns a constant")
            found.append(Result("storage", storage, layout, self._machine.values.known(tensor)))
            if tensor.requires_grad and layout.twin == number:
                leaving.append(number)
                note_escape(log.records[storage].span, storage)
        self._results, self._leaving = tuple(found), tuple(leaving)

    def _allowed(self) -> set[int]:
        params = self._machine.fake.params
        return {id(params[key]) for key in self._keys if key in params} | {id(self._machine.leaf)}

    def _note_given(self, node: int, targets: tuple[int | None, ...], given: Any, _: Any) -> Any:
        """A node has run: note what it gives to arguments, and keep that from autograd."""
        found = [(number, tensor) for number, tensor in zip(targets, given, strict=True) if number is not None]
        found = [(number, tensor) for number, tensor in found if tensor is not None]
        parts = []
        for (number, tensor), layout in zip(found, layouts([tensor for _, tensor in found]), strict=True):
            storage = self._log.number_of(tensor)
            if storage is None:
                raise NotReplayable("the gradient of an argument is a view of a parameter")
            parts.append((number, storage, layout))
        if parts:
            self._events.append((len(self._log.backward), self._machine.stack.span_of(node), tuple(parts)))
        return tuple(None if number is not None else tensor for number, tensor in zip(targets, given, strict=True))

    def _foreign(self) -> None:
        for number, record in enumerate(self._log.records):
            if record.kind == "input" and number not in self._roles and record.died_phase == ALIVE:
                raise NotReplayable("it reads a tensor that is neither its own nor an argument")


class Seed(torch.autograd.Function):
    """Where the backward of a recording begins: gives each result its gradient and holds none."""

    @staticmethod
    def forward(ctx: Any, block: "_Block", *outs: torch.Tensor) -> torch.Tensor:
        """A scalar that depends on all results."""
        ctx.block = block
        return torch.empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """A gradient for each result."""
        with ctx.block._machine.tracer.paused():
            return None, *ctx.block.gradients()


def _like(mine: Sequence[Layout]) -> tuple[Layout, ...]:
    """Gradients as results mostly get them: dense, each with its own storage."""
    found = []
    for number, layout in enumerate(mine):
        with _disable_current_modes():
            tensor = torch.empty_strided(layout.shape, layout.stride, device="meta", dtype=layout.dtype)
            plain = torch.empty_like(tensor, memory_format=torch.preserve_format)
        found.append(
            Layout(
                shape=layout.shape,
                stride=plain.stride(),
                offset=0,
                dtype=layout.dtype,
                nbytes=plain.untyped_storage().nbytes(),
                storage=number,
                twin=number,
                requires_grad=False,
                is_view=False,
            )
        )
    return tuple(found)


def _watch_nodes(
    outs: Sequence[torch.Tensor], edges: dict[tuple[Any, int], int], hook: Callable[..., Any], allowed: set[int]
) -> None:
    """Hang ``hook`` on every node of the block that gives to the gradient of an argument."""
    borders = {node for node, _ in edges}
    seen: set[Any] = set()
    stack = [tensor.grad_fn for tensor in outs]
    while stack:
        node = stack.pop()
        if node is None or node in seen or node in borders:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            if id(node.variable) not in allowed:  # type: ignore[attr-defined]
                raise NotReplayable("it reads a trained tensor that is neither its own nor an argument")
            continue
        targets = tuple(edges.get(edge) for edge in node.next_functions)
        if any(target is not None for target in targets):
            node.register_hook(partial(hook, node._sequence_nr(), targets))
        stack += [following for following, _ in node.next_functions]


@contextmanager
def _apart(machine: Machine) -> Iterator[StorageLog]:
    """What is traced in here goes into records of its own."""
    outer = machine.stack.log
    log = StorageLog()
    log.param_keys, log.twins, log.alias_places = outer.param_keys, outer.twins, outer.alias_places
    with machine.stack.apart(log), machine.tracer.apart(log), machine.values.apart():
        yield log
