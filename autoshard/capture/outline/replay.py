"""A recording written into the step once more, for a block that is alike, with autograd connected as it would be.

The block's forward is written at once. Its backward is a chain of autograd nodes, one for each node of the block that
gave something to the gradient of an argument: each writes the ops up to there and gives that part, so that autograd
itself adds up the parts of all readers in the order in which it would have. Storages that cross the border of the
block are real fake storages, held exactly as long as the block held them; all others are only written down.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoshard.capture.outline.alone import Machine
from autoshard.capture.outline.arguments import Layout, layouts
from autoshard.capture.outline.fresh import alias, empty
from autoshard.capture.outline.pairing import Pairing
from autoshard.capture.outline.recording import Recording
from autoshard.capture.outline.script import Script
from autoshard.capture.refusals import NotAsOutlined, NotReplayable
from autoshard.capture.spans import Span, note_escape
from autoshard.capture.storages import Gradient, StorageRecord
from autoshard.ir import OpNode

Renewed = Callable[[tuple[Layout, ...]], Recording]
"""A recording of the same forward for gradients of other layouts."""


class Replay:
    """One block that is written down instead of run.

    Args:
        machine: what traces the step.
        script: the recording.
        pairing: names and tensors of this block for those of the recording.
        digest: of the block's form.
        renewed: makes a recording for other gradients.
    """

    def __init__(
        self,
        machine: Machine,
        script: Script,
        pairing: Pairing,
        digest: str,
        renewed: Renewed,
    ) -> None:
        self._digest = digest
        self._machine, self._script, self._pairing, self._renewed = machine, script, pairing, renewed
        self._log, self._stack = machine.stack.log, machine.stack
        self._numbers: list[int] = [-1] * len(script.recording.pieces)
        self._holds: dict[int, Any] = {}
        self._spans: list[Span] = []
        self._is_done = False

    def forward(self, arguments: Sequence[torch.Tensor], given: Sequence[Layout]) -> list[torch.Tensor]:
        """Write the forward; the tensors of the result."""
        recording, log = self._script.recording, self._log
        places = {layout.storage: tensor for layout, tensor in zip(given, arguments, strict=True)}
        for number, place in self._script.given["argument"]:
            storage = places[place].untyped_storage()
            self._numbers[number] = log.known_index(storage)
            if recording.pieces[number].died_phase == "backward":
                self._holds[number] = storage
        for number, place in self._script.given["buffer"]:
            self._numbers[number] = log.known_index(self._pairing.tensors[place].untyped_storage())
        for number in recording.used:
            note_escape(log.records[self._numbers[number]].span, self._numbers[number])
        start = len(log.forward)
        self._add_spans(start)
        bases = self._write("forward", 0, len(recording.forward))
        for run, template in zip(self._spans, recording.spans, strict=True):
            run.outputs = {self._numbers[number] for number in template.outputs}
        self._note_facts()
        results = self._results(bases, arguments)
        if not recording.leaving:
            self._is_done = True
            return results
        leaving = [results[number] for number in recording.leaving]
        token = self._machine.leaf
        for index in reversed(range(len(self._script.segments))):
            parts: tuple[tuple[int, int, Layout], ...] = ()
            if index < len(recording.events):
                parts, span = recording.events[index].parts, recording.events[index].span
                self._stack.mark(None if span < 0 else self._spans[span])
            token = _Part.apply(self, index, token, *(arguments[argument] for argument, _, _ in parts))
        self._stack.mark(self._stack.current)
        self._leaving: list[torch.Tensor] = leaving
        made = _Exit.apply(self, token)
        for number, tensor in zip(recording.leaving, made, strict=True):
            results[number] = tensor
        for number, result in enumerate(recording.results):
            results[number] = results[result.layout.twin] if result.source == "storage" else results[number]
        self._stack.hook(self._spans[0], results)
        return results

    def begin_backward(self, grads: Sequence[torch.Tensor | None]) -> None:
        """The gradients of the results have come in."""
        recording = self._script.recording
        given = [grad for grad in grads if grad is not None]
        if len(given) != len(grads):
            raise NotReplayable("one of its results gets no gradient")
        incoming = tuple(replace(layout, is_view=False) for layout in layouts(given))
        if incoming != recording.incoming:
            self._exchange(Script(self._renewed(incoming)))
            recording = self._script.recording
        places = {layout.storage: tensor for tensor, layout in zip(given, incoming, strict=True)}
        for number, place in self._script.given["gradient"]:
            self._numbers[number] = self._log.known_index(places[place].untyped_storage())
            self._holds[number] = places[place]
        self._keep_for_events()
        self._release("backward", -1)

    def part(self, index: int) -> list[torch.Tensor]:
        """Write one segment of the backward; what it gives to gradients of arguments."""
        recording, first, end = self._script.recording, *self._script.segments[index]
        offset = len(self._log.backward) - first
        bases = self._write("backward", first, end)
        for span, low, high in self._script.touched[index]:
            self._spans[span].touch_backward(offset + low)
            self._spans[span].touch_backward(offset + high)
        # The hook on the result of the block itself fires by itself; those inside fired so far in the recording.
        for run, template in zip(self._spans[1:], recording.spans[1:], strict=True):
            if run.hooked_at is None and template.hooked_at is not None and template.hooked_at <= end:
                run.hooked_at = offset + template.hooked_at
        if first < end and recording.backward_spans[end - 1] >= 0:
            self._stack.set_last_backward(self._spans[recording.backward_spans[end - 1]])
        self._bases.update(bases)
        if index == len(self._script.segments) - 1:
            self._finish()
        if index >= len(recording.events):
            return []
        made = []
        for _, number, layout in recording.events[index].parts:
            made.append(alias(self._bases[number], layout))
            self._uses[number] -= 1
            if not self._uses[number]:
                del self._bases[number]
        return made

    def __del__(self) -> None:
        """The result was thrown away without a backward: so is what the block has kept."""
        if self._is_done or self._log.is_closed:
            return
        for number, piece in enumerate(self._script.recording.pieces):
            if piece.role == "own" and piece.born_phase == "forward" and piece.died_phase == "backward":
                self._died(number)

    def _exchange(self, script: Script) -> None:
        """Go on with another recording of the same forward."""
        old, new = self._script.recording, script.recording
        events = [[(event.span, [a for a, _, _ in event.parts]) for event in each.events] for each in (old, new)]
        count = sum(piece.born_phase == "forward" for piece in old.pieces)
        if (
            events[0] != events[1]
            or old.forward != new.forward
            or [piece[:4] for piece in old.pieces[:count]] != [piece[:4] for piece in new.pieces[:count]]
            or any(
                old.pieces[n].died_phase != new.pieces[n].died_phase
                for n in range(count)
                if old.pieces[n].role in ("own", "argument")
            )
        ):
            raise NotReplayable("its gradients come in different layouts, and its steps depend on them")
        self._script = script
        self._numbers = self._numbers[:count] + [-1] * (len(new.pieces) - count)

    def _keep_for_events(self) -> None:
        """Tensors on storages that are given away, until the last time."""
        self._bases: dict[int, torch.Tensor] = {}
        self._uses: dict[int, int] = {}
        pieces = self._script.recording.pieces
        for event in self._script.recording.events:
            for _, number, _ in event.parts:
                self._uses[number] = self._uses.get(number, 0) + 1
                if pieces[number].born_phase == "forward" or pieces[number].role == "gradient":
                    self._bases[number] = self._holds[number]

    def _add_spans(self, start: int) -> None:
        made = []
        for template in self._script.recording.spans:
            span = Span(self._pairing.modules.get(template.module, template.module), None, start)
            span.forward_start, span.forward_end = start + template.forward_start, start + template.forward_end
            span.is_open = False
            for name in _COPIED:
                setattr(span, name, getattr(template, name))
            made.append(span)
        self._spans = self._stack.replay(made, self._script.recording.parents)

    def _write(self, phase: str, first: int, end: int) -> dict[int, torch.Tensor]:
        """Write ops; tensors on the storages that leave the block and appeared now."""
        script, log, numbers = self._script, self._log, self._numbers
        births, deaths = script.births[phase], script.deaths[phase]
        module_of, param_of = self._pairing.modules.get, self._pairing.params.get
        ops = script.recording.forward if phase == "forward" else script.recording.backward
        out = log.ops
        crossing: dict[int, torch.Tensor] = {}
        for index in range(first, end):
            if index in births:
                self._births(births[index], crossing)
            op = ops[index]
            out.append(
                OpNode(
                    target=op.target,
                    module=module_of(op.module, op.module),
                    inputs=tuple([numbers[n] for n in op.inputs]),
                    outputs=tuple([numbers[n] for n in op.outputs]),
                    params=tuple([param_of(key, key) for key in op.params]) if op.params else (),
                    flops=op.flops,
                    bytes_read=op.bytes_read,
                    bytes_written=op.bytes_written,
                    is_view=op.is_view,
                    is_recompute=op.is_recompute,
                )
            )
            if index in deaths:
                for number in deaths[index]:
                    self._died(number)
        if phase == "backward":
            spans = [*self._spans, None]  # -1 is the last
            log.backward_spans += [spans[span] for span in script.recording.backward_spans[first:end]]
        return crossing

    def _births(self, numbers: list[int], crossing: dict[int, torch.Tensor]) -> None:
        log, pieces, records = self._log, self._script.recording.pieces, self._log.records
        for number in numbers:
            if number in self._script.crossing:
                self._born(number, crossing)
                continue
            piece = pieces[number]
            self._numbers[number] = len(records)
            records.append(StorageRecord(piece.nbytes, log.phase, len(log.ops), piece.kind, None))

    def _born(self, number: int, crossing: dict[int, torch.Tensor]) -> None:
        """A storage that leaves the block appears, and so there is a tensor on it."""
        with self._machine.tracer.paused():
            base = crossing[number] = empty(self._script.crossing[number])
            self._holds[number] = base.detach()
        self._numbers[number] = self._log.index(base.untyped_storage(), self._span_that_made(number))

    def _span_that_made(self, number: int) -> Span | None:
        made = self._script.recording.makers.get(number, -1)
        return None if made < 0 else self._spans[made]

    def _died(self, number: int) -> None:
        if self._holds.pop(number, None) is not None or self._script.recording.pieces[number].role != "own":
            return
        if number in self._script.crossing:
            return
        record, log = self._log.records[self._numbers[number]], self._log
        record.died_phase, record.died = log.phase, len(log.ops) - 1

    def _release(self, phase: str, index: int) -> None:
        for number in self._script.deaths[phase].get(index, ()):
            self._died(number)

    def _results(self, bases: dict[int, torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        recording, made = self._script.recording, []
        with self._machine.tracer.paused(), torch.no_grad():
            for result in recording.results:
                if result.source == "argument":
                    made.append(arguments[result.number])
                    continue
                if result.layout.twin < len(made):
                    made.append(made[result.layout.twin])
                    continue
                base = bases.get(result.number)
                if base is None:
                    base = self._given(result.number, arguments)
                tensor = alias(base, result.layout, as_view=result.layout.is_view)
                if result.value is not None:
                    self._machine.values.set(tensor, *result.value)
                made.append(tensor)
        return made

    def _given(self, number: int, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor on a storage that was there before the block ran."""
        piece = self._script.recording.pieces[number]
        if piece.role == "buffer":
            return self._pairing.tensors[piece.place]
        cdata = {self._log.number_of(tensor): tensor for tensor in arguments}
        return cdata[self._numbers[number]]

    def _note_facts(self) -> None:
        recording, tracer, log = self._script.recording, self._machine.tracer, self._log
        modules, params = self._pairing.modules, self._pairing.params
        current = self._stack.current
        above = current.stack() if current is not None else ()
        for key, stacks in recording.readers.items():
            known = tracer.readers[params.get(key, key)]
            for stack in stacks:
                known.setdefault((*above, *(modules.get(fqn, fqn) for fqn in stack)))
        tracer.written.update(params.get(key, key) for key in recording.written)
        tracer.drops.update(modules.get(fqn, fqn) for fqn in recording.drops)
        self._stack.recomputed.update(modules.get(fqn, fqn) for fqn in recording.recomputed)
        values = self._machine.values
        for module, op, what in recording.assumed:
            values.assumed.setdefault((modules.get(module, module), op, what))
        for place in recording.written_tensors:
            values.forget(self._pairing.tensors[place])
        log.replayed_modules.add(modules[recording.fqn])
        log.replayed_modules.update(modules.get(fqn, fqn) for fqn in recording.modules)
        if recording.leaving:
            log.replayed_params.update(params.get(key, key) for key in recording.params)

    def _finish(self) -> None:
        self._is_done = True
        recording, log, params = self._script.recording, self._log, self._pairing.params
        for key, grad in recording.grads.items():
            number = self._numbers[grad.number] if grad.number >= 0 else -1
            log.replayed_grads[params.get(key, key)] = Gradient(number, grad.nbytes)
        log.replayed_sparse.update(params.get(key, key) for key in recording.sparse)


_COPIED = (
    "changes_input", "escapes", "inputs_need_grad", "output_needs_grad", "output_is_view", "output_kind", "opaque",
    "input_bytes", "output_bytes",
)  # fmt: skip


class _Exit(torch.autograd.Function):
    """The results of a replayed block; its backward takes in their gradients."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.replay = replay
        ctx.set_materialize_grads(False)
        leaving, replay._leaving = replay._leaving, []
        return tuple(leaving)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        replay = ctx.replay
        with replay._machine.tracer.paused():
            try:
                replay.begin_backward(grads)
            except NotReplayable as reason:
                raise NotAsOutlined(replay._digest, str(reason)) from None
            return None, torch.empty(0)


class _Part(torch.autograd.Function):
    """One segment of the backward of a replayed block, up to where it gives to the gradient of an argument."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, index: int, token: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.replay, ctx.index = replay, index
        ctx.is_last = token is replay._machine.leaf
        ctx.set_materialize_grads(False)
        with replay._machine.tracer.paused():
            return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, token: Any) -> Any:
        with ctx.replay._machine.tracer.paused():
            given = ctx.replay.part(ctx.index)
        return None, None, None if ctx.is_last else token, *given
