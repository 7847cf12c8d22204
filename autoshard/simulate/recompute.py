"""The step in which some modules recompute: the captured graph, rewritten as torch's checkpointing would run it.

``recomputed`` is pure: graph in, graph out, so that hooks, memory and clocks see nothing new; a model that recomputes
by itself is captured in the same form. What torch 2.13 does (``torch/utils/checkpoint.py``, without reentrant autograd)
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.analysis.recompute import mingling
from autoshard.errors import RequestError
from autoshard.ir import CALLER, ModelGraph, ModuleSpan, Moment, OpNode, Region, StorageInfo
from autoshard.ir.tree import Tree

SAVES_NOTHING = frozenset(
    [
        "add",
        "add_",
        "sub",
        "sub_",
        "rsub",
        "neg",
        "neg_",
        "sum",
        "mean",
        "cat",
        "stack",
        "clone",
        "copy_",
        "_to_copy",
        "detach",
        "constant_pad_nd",
        "repeat",
        "roll",
        "flip",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "fill_",
        "zero_",
    ]
)
"""Names of ops whose backward needs none of the tensors that they read or make."""

_KEPT = -1
"""In place of a part: backward ops of modules that do not recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One run of a module that recomputes.

    Attributes:
        modules: FQNs of the module and all inside it.
        forward: first and past-the-end op of its forward.
        stop: past-the-end op of what runs again.
        start: backward op that asks for it.
        release: last backward op during which the arguments are held.
    """

    modules: frozenset[str]
    forward: tuple[int, int]
    stop: int
    start: int
    release: int

    @property
    def length(self) -> int:
        """Ops that run again."""
        return self.stop - self.forward[0]


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
    uses = _Uses(graph.root)
    parts = tuple(part for span, inside in _spans(graph, modules) if (part := _part(graph.root, uses, span, inside)))
    return replace(graph, regions=(*graph.regions[:-1], _Rewriting(graph.root, uses, parts).region()))


def _spans(graph: ModelGraph, modules: Sequence[str]) -> Iterator[tuple[ModuleSpan, frozenset[str]]]:
    """Runs of the modules, in the order of forward, each with the modules inside."""
    tree = Tree.of(graph)
    named: dict[str, str] = {}
    for fqn in modules:
        canonical = tree.canonical(fqn)
        if canonical is None:
            raise RequestError("recompute", fqn, "a module of the model")
        if tree.nodes[canonical].num_calls:
            named[canonical] = fqn
    for canonical, fqn in named.items():
        inside = tree.below(canonical)
        for inner in sorted(inside):
            if inner != canonical and inner in named:
                raise RequestError("recompute", fqn, f"a module without another one that recomputes in it ({inner})")
            if "checkpointed" in tree.nodes[inner].traits:
                raise RequestError("recompute", fqn, f"a module in which nothing recomputes by itself ({inner} does)")
    spans = [span for span in graph.root.spans if span.module in named]
    for fqn in mingling(spans):
        raise RequestError("recompute", named[fqn], "a module whose runs do not mingle in backward")
    for span in spans:
        yield span, tree.below(span.module)


class _Uses:
    """Who uses what: the last forward op by storage, and what each backward op reads of what forward left.

    Attributes:
        last_forward: by storage: the last op that uses it, or at the end of which Python still holds it because it is
            an argument of a running module.
        saved: by backward op: storages and keys of parameters that it reads, those made in backward left out.
    """

    def __init__(self, root: Region) -> None:
        self.last_forward: dict[int, int] = {}
        for index, op in enumerate(root.forward):
            for storage in (*op.inputs, *op.outputs):
                self.last_forward[storage] = index
        for span in root.spans:
            first, end = span.forward
            for storage in {name for op in root.forward[first:end] for name in op.inputs}:
                born = root.storages[storage].born
                if born.phase == "forward" and born.index < first:
                    self.last_forward[storage] = max(self.last_forward[storage], end - 1)
        is_older = [storage.born.phase != "backward" for storage in root.storages]
        self.saved: list[tuple[int | str, ...]] = [
            (*(storage for storage in op.inputs if is_older[storage]), *op.params) for op in root.backward
        ]


def _part(root: Region, uses: _Uses, span: ModuleSpan, inside: frozenset[str]) -> _Part | None:
    """``None`` if its backward asks for nothing that its forward saved."""
    if span.backward is None:
        return None
    saved: dict[str, set[int | str]] = defaultdict(set)
    asking = []
    for index in range(*span.backward):
        op = root.backward[index]
        if op.module in inside and uses.saved[index]:
            saved[op.module].update(uses.saved[index])
            asking.append(index)
    if not asking:
        return None
    first, end = span.forward
    made = {
        number
        for names in saved.values()
        for number in names
        if isinstance(number, int) and _is_born(root, number, span)
    }
    last_made = max((root.storages[number].born.index + 1 for number in made), default=first)
    deaths = [dies.index for number in made if (dies := root.storages[number].dies).phase == "backward"]
    return _Part(
        modules=inside,
        forward=(first, end),
        stop=max(last_made, _stop(root, first, end, saved)),
        start=asking[0],
        release=max([asking[-1], *(index for index in deaths if index < span.backward[1])]),
    )


def _is_born(root: Region, number: int, span: ModuleSpan) -> bool:
    born = root.storages[number].born
    return born.phase == "forward" and span.forward[0] <= born.index < span.forward[1]


def _stop(root: Region, first: int, end: int, saved: dict[str, set[int | str]]) -> int:
    """Past-the-end op of the second run, which ends where the last tensor is saved."""
    for index in reversed(range(first, end)):
        op = root.forward[index]
        if op.is_view or _name(op) in SAVES_NOTHING or op.module not in saved:
            continue
        names = saved[op.module]
        if any(number in names and root.storages[number].born.index == index for number in op.outputs):
            return index + 1
        if not names.isdisjoint((*op.inputs, *op.params)):
            return index
    return first


def _name(op: OpNode) -> str:
    return op.target.split(".")[1] if "." in op.target else op.target


class _Rewriting:
    """One rewrite of a region; positions in backward move by the ops that are put in before them."""

    def __init__(self, root: Region, uses: _Uses, parts: tuple[_Part, ...]) -> None:
        self.root, self.uses, self.parts = root, uses, parts
        self.in_order = sorted(range(len(parts)), key=lambda number: parts[number].start)
        self.offsets: dict[int, int] = {}
        moved = 0
        for number in self.in_order:
            self.offsets[number] = parts[number].start + moved
            moved += parts[number].length
        self.moved_op = self._moved_ops()
        self.part_of_op = self._parts_of_ops()
        self.part_of_forward = [_KEPT] * len(root.forward)
        for number, part in enumerate(parts):
            self.part_of_forward[slice(*part.forward)] = [number] * (part.forward[1] - part.forward[0])
        self.storages: list[StorageInfo] = []
        self.copies: list[dict[int, int]] = [{} for _ in parts]

    def region(self) -> Region:
        """The region, rewritten."""
        self._rewrite_storages()
        backward: list[OpNode] = []
        waiting = list(self.in_order)
        for index, op in enumerate(self.root.backward):
            while waiting and self.parts[waiting[0]].start == index:
                backward += self._again(waiting.pop(0))
            owner = self.part_of_op[index]
            if owner != _KEPT and not self.copies[owner].keys().isdisjoint(op.inputs):
                op = replace(op, inputs=_renamed(op.inputs, self.copies[owner]))
            backward.append(op)
        return replace(
            self.root,
            backward=tuple(backward),
            storages=tuple(self.storages),
            spans=tuple(self._span(span) for span in self.root.spans),
        )

    def _moved_ops(self) -> list[int]:
        """New index of each backward op."""
        moved = []
        before, waiting = 0, list(self.in_order)
        for index in range(len(self.root.backward)):
            while waiting and self.parts[waiting[0]].start <= index:
                before += self.parts[waiting.pop(0)].length
            moved.append(index + before)
        return moved

    def _parts_of_ops(self) -> list[int]:
        found = [_KEPT] * len(self.root.backward)
        for span in self.root.spans:
            for number, part in enumerate(self.parts):
                if span.forward == part.forward and span.module in part.modules and span.backward is not None:
                    for index in range(*span.backward):
                        if self.root.backward[index].module in part.modules:
                            found[index] = number
        return found

    def _copied(self, number: int, index: int) -> int:
        """Backward index of a part's forward op as it runs again."""
        return self.offsets[number] + index - self.parts[number].forward[0]

    # -- storages

    def _rewrite_storages(self) -> None:
        reads: dict[int, dict[int, int]] = defaultdict(dict)
        for index, names in enumerate(self.uses.saved):
            for name in names:
                if isinstance(name, int):
                    reads[name][self.part_of_op[index]] = index
        holders: dict[int, set[int]] = defaultdict(set)
        for number, part in enumerate(self.parts):
            for op in self.root.forward[slice(*part.forward)]:
                for name in op.inputs:
                    holders[name].add(number)
        extra: list[StorageInfo] = []
        total = len(self.root.storages)
        for index, storage in enumerate(self.root.storages):
            home = self._home(storage)
            held = max((self.parts[number].release for number in holders[index] if number != home), default=-1)
            self.storages.append(self._first_life(index, storage, home, reads[index], held))
            if home != _KEPT and storage.born.index < self.parts[home].stop:
                self.copies[home][index] = total + len(extra)
                extra.append(self._second_life(index, storage, home, reads[index]))
        self.storages += extra

    def _home(self, storage: StorageInfo) -> int:
        """The part in whose forward a storage is born."""
        return self.part_of_forward[storage.born.index] if storage.born.phase == "forward" else _KEPT

    def _first_life(self, index: int, storage: StorageInfo, home: int, reads: dict[int, int], held: int) -> StorageInfo:
        """A storage as the first run makes it; ``held`` is the last op of the parts that hold it as an argument."""
        dies = storage.dies
        if home != _KEPT and storage.kind == "activation" and home in reads:
            others = max((at for number, at in reads.items() if number != home), default=-1)
            if others > reads[home]:
                pass  # saved by the module, and longer by what comes after it
            elif others >= 0:
                dies = Moment(phase="backward", index=others)
            else:
                dies = Moment(phase="forward", index=self.uses.last_forward.get(index, storage.born.index))
        if held >= 0 and dies != CALLER and storage.born.phase != "backward":
            before = dies.index if dies.phase == "backward" else -1
            dies = Moment(phase="backward", index=max(held, before))
        if storage.born.phase != "backward" and dies == storage.dies and dies.phase != "backward":
            return storage
        kind = storage.kind
        if kind in ("activation", "temporary") and dies != CALLER:
            kind = "temporary" if storage.born.phase == dies.phase else "activation"
        return StorageInfo(
            nbytes=storage.nbytes,
            born=self._moved(storage.born),
            dies=self._moved(dies),
            kind=kind,
            param=storage.param,
        )

    def _second_life(self, index: int, storage: StorageInfo, home: int, reads: dict[int, int]) -> StorageInfo:
        """The same storage as the second run makes it."""
        part = self.parts[home]
        last = self._copied(home, part.stop - 1)
        if home in reads:
            is_last = storage.kind == "activation" and reads[home] == max(reads.values())
            dies = self.moved_op[storage.dies.index if is_last else reads[home]]
        elif storage.dies.phase == "forward":
            dies = min(last, self._copied(home, storage.dies.index))
        else:
            used = [i for i in range(storage.born.index, part.stop) if _touches(self.root.forward[i], index)]
            dies = self._copied(home, max(used, default=storage.born.index))
        born = Moment(phase="backward", index=self._copied(home, storage.born.index))
        return StorageInfo(
            nbytes=storage.nbytes, born=born, dies=Moment(phase="backward", index=dies), kind="temporary"
        )

    def _moved(self, moment: Moment) -> Moment:
        if moment.phase != "backward":
            return moment
        return Moment(phase="backward", index=self.moved_op[moment.index])

    # -- ops and spans

    def _again(self, number: int) -> Iterator[OpNode]:
        part, copies = self.parts[number], self.copies[number]
        for op in self.root.forward[part.forward[0] : part.stop]:
            inputs, outputs = _renamed(op.inputs, copies), _renamed(op.outputs, copies)
            yield replace(op, inputs=inputs, outputs=outputs, is_recompute=True)

    def _span(self, span: ModuleSpan) -> ModuleSpan:
        """A span's backward, moved; inside a part it begins with what runs again."""
        if span.backward is None or span.backward[0] >= span.backward[1]:
            return span
        first, stop = span.backward
        start, end = self.moved_op[first], self.moved_op[stop - 1] + 1
        for number, part in enumerate(self.parts):
            is_inside = span.forward[0] >= part.forward[0] and span.forward[1] <= part.forward[1]
            if is_inside and span.module in part.modules:
                if span.forward[0] < part.stop:
                    start = min(start, self._copied(number, span.forward[0]))
                    end = max(end, self._copied(number, min(span.forward[1], part.stop) - 1) + 1)
            elif part.start == first:
                start = min(start, self.offsets[number])
        return replace(span, backward=(start, end))


def _touches(op: OpNode, storage: int) -> bool:
    return storage in op.inputs or storage in op.outputs


def _renamed(numbers: Iterable[int], names: dict[int, int]) -> tuple[int, ...]:
    return tuple(names.get(number, number) for number in numbers)
