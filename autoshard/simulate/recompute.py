"""The step in which some modules recompute: the captured graph, rewritten as torch's checkpointing would run it.

``Rerun`` says by numbers what moves, what runs again and what lives how long, which is all that a profile reads.
``recomputed`` makes a graph of it, so that nothing else sees anything new; a model that recomputes by itself is
captured in the same form. What torch 2.13 does (``torch/utils/checkpoint.py``, without reentrant autograd)
and what is done here for it:

- What autograd would save inside the module is let go in forward, once nothing in forward uses it any more; the
  arguments of a module are held by its caller until it returns.
- The arguments are held until autograd has released the last node of the module that saved something.
- The first node that asks for something saved runs the forward again; what was saved lives from then on as long as it
  would have lived, everything else dies as in forward.
- The second run stops as soon as the last saved tensor is there (early stop). A tensor that an op reads is saved before
  the op runs, one that it makes is saved after. The graph does not tell which op saved a tensor: it is the last one
  that touches it in the module whose backward reads it, ops left out that never save anything.

What else Python's local variables hold in forward although no op needs it any more is not in the graph and not counted,
nor are arguments that no op of the module uses.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoshard.ir import CALLER, ModelGraph, ModuleSpan, Moment, OpNode, Region, StorageInfo
from autoshard.simulate.parts import Part, Uses, find_parts

_KEPT = -1
"""In place of a part: backward ops of modules that do not recompute."""

BEFORE = -1
"""In place of the first op of what the caller made."""

Life = tuple[int, int, int]
"""A storage of the captured step, and its first and last op."""


def recomputed(graph: ModelGraph, modules: Sequence[str]) -> ModelGraph:
    """The graph of the step in which these modules recompute their activations in backward.

    Args:
        graph: a captured step, one flat region.
        modules: FQNs.

    Raises:
        RequestError: a module does not exist, contains another one or one that recomputes by itself, or its runs cannot
            be told apart in backward. One that never runs has nothing to recompute.
    """
    if not modules:
        return graph
    return replace(graph, regions=(*graph.regions[:-1], _region(graph.root, rerun(graph, modules))))


def rerun(graph: ModelGraph, modules: Sequence[str]) -> "Rerun":
    """The same by numbers alone. Raises as ``recomputed`` does."""
    uses, parts = find_parts(graph, modules)
    return Rerun(graph.root, uses, parts)


class Rerun:
    """A step in which parts of forward run again; ops are numbered through, forward first.

    Attributes:
        num_forward: ops of forward.
        num_ops: all ops; as the last op of a life it says that the life outlasts the step.
        sources: by op of backward: the op of the captured step that it is.
        moved: by op of the captured backward: its place in this backward.
        part_of_op: by op of the captured backward: the part whose backward it belongs to.
        copies: by part: the second lives, as indices behind those of the captured storages.
        lives: of the captured storages, then the second ones.
    """

    def __init__(self, root: Region, uses: Uses, parts: tuple[Part, ...]) -> None:
        self.root, self.uses, self.parts = root, uses, parts
        self.num_forward = len(root.forward)
        self.in_order = sorted(range(len(parts)), key=lambda number: parts[number].start)
        self.offsets: dict[int, int] = {}
        self.sources: list[int] = []
        self.moved: list[int] = []
        self._interleave()
        self.num_ops = self.num_forward + len(self.sources)
        self.part_of_op = self._parts_of_ops()
        self.part_of_forward = [_KEPT] * len(root.forward)
        for number, part in enumerate(parts):
            self.part_of_forward[slice(*part.forward)] = [number] * (part.forward[1] - part.forward[0])
        self.begins: dict[int, list[int]] = defaultdict(list)
        for number, part in enumerate(parts):
            self.begins[part.start].append(number)
        self.copies: list[dict[int, int]] = [{} for _ in parts]
        self.lives = self._lives()

    def _interleave(self) -> None:
        at, num_backward = 0, len(self.root.backward)
        for number in self.in_order:
            part = self.parts[number]
            self._forward_to(at, part.start)
            at = part.start
            self.offsets[number] = len(self.sources)
            self.sources += range(part.forward[0], part.stop)
        self._forward_to(at, num_backward)

    def _forward_to(self, at: int, stop: int) -> None:
        """Ops of the captured backward, as they are."""
        self.moved += range(len(self.sources), len(self.sources) + stop - at)
        self.sources += range(self.num_forward + at, self.num_forward + stop)

    def _parts_of_ops(self) -> list[int]:
        found = [_KEPT] * len(self.root.backward)
        by_forward: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, part in enumerate(self.parts):
            by_forward[part.forward].append(number)
        for span in self.root.spans:
            for number in by_forward.get(span.forward, ()):
                modules = self.parts[number].modules
                if span.module in modules and span.backward is not None:
                    for index in range(*span.backward):
                        if self.root.backward[index].module in modules:
                            found[index] = number
        return found

    def again(self, number: int, index: int) -> int:
        """Place in backward of a part's forward op as it runs again."""
        return self.offsets[number] + index - self.parts[number].forward[0]

    def number(self, moment: Moment, at_caller: int) -> int:
        """The op of this step at which a moment of the captured one stands."""
        if moment.phase == "forward":
            return moment.index
        return at_caller if moment.phase == "caller" else self.num_forward + self.moved[moment.index]

    def place(self, op: int) -> int:
        """The op of this step that an op of the captured one has become, numbered through."""
        return op if op < self.num_forward else self.num_forward + self.moved[op - self.num_forward]

    def places(self, op: int) -> tuple[int, ...]:
        """The same, and where it runs again."""
        number = self.part_of_forward[op] if op < self.num_forward else _KEPT
        if number == _KEPT or op >= self.parts[number].stop:
            return (self.place(op),)
        return op, self.num_forward + self.again(number, op)

    # -- storages

    def _lives(self) -> list[Life]:
        storages, end, shift, moved = self.root.storages, self.num_ops, self.num_forward, self.moved
        found: list[Life] = []
        reads = self._reads()
        holders = self._holders()
        extra: list[Life] = []
        total = len(storages)
        for index, storage in enumerate(storages):
            born, dies = storage.born, storage.dies
            home = self.part_of_forward[born.index] if born.phase == "forward" else _KEPT
            if home == _KEPT and index not in holders:
                first = born.index if born.phase == "forward" else self.number(born, BEFORE)
                last = shift + moved[dies.index] if dies.phase == "backward" else self.number(dies, end)
                found.append((index, first, last))
                continue
            by_part = reads.get(index, {})
            held = max((self.parts[number].release for number in holders.get(index, ()) if number != home), default=-1)
            found.append((index, self.number(born, BEFORE), self._first_end(index, storage, home, by_part, held)))
            if home != _KEPT and born.index < self.parts[home].stop:
                self.copies[home][index] = total + len(extra)
                again = shift + self.again(home, born.index)
                extra.append((index, again, shift + self._second_end(index, storage, home, by_part)))
        return found + extra

    def _reads(self) -> dict[int, dict[int, int]]:
        """By storage: the last backward op of each part that reads it."""
        reads: dict[int, dict[int, int]] = defaultdict(dict)
        for index, names in enumerate(self.uses.saved):
            for name in names:
                if isinstance(name, int):
                    reads[name][self.part_of_op[index]] = index
        return reads

    def _holders(self) -> dict[int, set[int]]:
        """By storage: the parts that read it in forward."""
        holders: dict[int, set[int]] = defaultdict(set)
        for number, part in enumerate(self.parts):
            for op in self.root.forward[slice(*part.forward)]:
                for name in op.inputs:
                    holders[name].add(number)
        return holders

    def _first_end(self, index: int, storage: StorageInfo, home: int, reads: dict[int, int], held: int) -> int:
        """Last op of a storage as the first run makes it; parts hold it as an argument up to ``held``, in backward."""
        dies = storage.dies
        if home != _KEPT and storage.kind == "activation" and home in reads:
            others = max((at for number, at in reads.items() if number != home), default=-1)
            if others > reads[home]:
                pass  # saved by the module, and longer by what comes after it
            elif others >= 0:
                dies = Moment(phase="backward", index=others)
            else:
                dies = Moment(phase="forward", index=self.uses.last_forward.get(index, storage.born.index))
        if held >= 0 and dies.phase != "caller" and storage.born.phase != "backward":
            before = dies.index if dies.phase == "backward" else -1
            return self.num_forward + self.moved[max(held, before)]
        return self.number(dies, self.num_ops)

    def _second_end(self, index: int, storage: StorageInfo, home: int, reads: dict[int, int]) -> int:
        """Last op, in backward, of the same storage as the second run makes it."""
        part = self.parts[home]
        if home in reads:
            is_last = storage.kind == "activation" and reads[home] == max(reads.values())
            return self.moved[storage.dies.index if is_last else reads[home]]
        if storage.dies.phase == "forward":
            return min(self.again(home, part.stop - 1), self.again(home, storage.dies.index))
        used = [i for i in range(storage.born.index, part.stop) if _touches(self.root.forward[i], index)]
        return self.again(home, max(used, default=storage.born.index))

    # -- spans

    def backward_of(self, span: ModuleSpan) -> tuple[int, int] | None:
        """Where a span's backward stands; inside a part it begins with what runs again."""
        if span.backward is None or span.backward[0] >= span.backward[1]:
            return span.backward
        first, stop = span.backward
        start, end = self.moved[first], self.moved[stop - 1] + 1
        for number in self._parts_at(span):
            part = self.parts[number]
            is_inside = span.forward[0] >= part.forward[0] and span.forward[1] <= part.forward[1]
            if is_inside and span.module in part.modules:
                if span.forward[0] < part.stop:
                    start = min(start, self.again(number, span.forward[0]))
                    end = max(end, self.again(number, min(span.forward[1], part.stop) - 1) + 1)
            elif part.start == first:
                start = min(start, self.offsets[number])
        return start, end

    def _parts_at(self, span: ModuleSpan) -> list[int]:
        """The parts that may move a span: those in whose forward it stands, and those that begin where it does."""
        assert span.backward is not None
        beside = (span.forward[0] - 1, span.forward[0])
        here = {self.part_of_forward[at] for at in beside if 0 <= at < self.num_forward} - {_KEPT}
        return sorted(here.union(self.begins.get(span.backward[0], ())))


def _region(root: Region, again: Rerun) -> Region:
    """The captured region, rewritten."""
    backward: list[OpNode] = []
    waiting = list(again.in_order)
    for index, op in enumerate(root.backward):
        while waiting and again.parts[waiting[0]].start == index:
            number = waiting.pop(0)
            part, copies = again.parts[number], again.copies[number]
            for each in root.forward[part.forward[0] : part.stop]:
                inputs, outputs = _renamed(each.inputs, copies), _renamed(each.outputs, copies)
                backward.append(replace(each, inputs=inputs, outputs=outputs, is_recompute=True))
        owner = again.part_of_op[index]
        if owner != _KEPT and not again.copies[owner].keys().isdisjoint(op.inputs):
            op = replace(op, inputs=_renamed(op.inputs, again.copies[owner]))
        backward.append(op)
    num_first = len(root.storages)
    storages = [_storage(root.storages[life[0]], life, again, at >= num_first) for at, life in enumerate(again.lives)]
    return replace(
        root,
        backward=tuple(backward),
        storages=tuple(storages),
        spans=tuple(replace(span, backward=again.backward_of(span)) for span in root.spans),
    )


def _storage(storage: StorageInfo, life: Life, again: Rerun, is_second: bool) -> StorageInfo:
    born, dies = _moment(life[1], again), _moment(life[2], again)
    if is_second:
        return StorageInfo(nbytes=storage.nbytes, born=born, dies=dies, kind="temporary")
    kind = storage.kind
    if kind in ("activation", "temporary") and dies != CALLER:
        kind = "temporary" if born.phase == dies.phase else "activation"
    return StorageInfo(nbytes=storage.nbytes, born=born, dies=dies, kind=kind, param=storage.param)


def _moment(number: int, again: Rerun) -> Moment:
    if number in (BEFORE, again.num_ops):
        return CALLER
    if number < again.num_forward:
        return Moment(phase="forward", index=number)
    return Moment(phase="backward", index=number - again.num_forward)


def _touches(op: OpNode, storage: int) -> bool:
    return storage in op.inputs or storage in op.outputs


def _renamed(numbers: Iterable[int], names: dict[int, int]) -> tuple[int, ...]:
    return tuple(names.get(number, number) for number in numbers)
