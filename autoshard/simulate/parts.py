"""Runs of modules that recompute: which op of backward asks for one, how far it runs again, what it holds till when."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.analysis.recompute import mingling
from autoshard.errors import RequestError
from autoshard.ir import ModelGraph, ModuleSpan, OpNode, Region
from autoshard.ir.recent import Recent
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
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


def find_parts(graph: ModelGraph, modules: Sequence[str]) -> "tuple[Uses, tuple[Part, ...]]":
    """Who uses what in the captured step, and the runs of these modules that ask for something again.

    Raises:
        RequestError: as ``recomputed`` does.
    """
    uses = _RECENT.get(graph.root, None, lambda: Uses(graph.root))
    found = []
    for span, inside in _spans(graph, modules):
        key = span.module, span.forward
        if key not in uses.parts:
            uses.parts[key] = _part(graph.root, uses, span, inside)
        part = uses.parts[key]
        if part is not None:
            found.append(part)
    return uses, tuple(found)


def _spans(graph: ModelGraph, modules: Sequence[str]) -> Iterator[tuple[ModuleSpan, frozenset[str]]]:
    """Runs of the modules, in the order of forward, each with the modules inside."""
    tree = Tree.of(graph)
    named: dict[str, str] = {}
    for fqn in modules:
        canonical = tree.canonical(fqn)
        if canonical is None:
            raise RequestError("recompute", fqn, "a module of the model")
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


class Uses:
    """Who uses what: the last forward op by storage, and what each backward op reads of what forward left.

    Attributes:
        last_forward: by storage: the last op that uses it, or at the end of which Python still holds it because it is
            an argument of a running module.
        saved: by backward op: storages and keys of parameters that it reads, those made in backward left out.
        parts: runs that were looked at already, by module and forward ops.
    """

    def __init__(self, root: Region) -> None:
        self.parts: dict[tuple[str, tuple[int, int]], Part | None] = {}
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


_RECENT: Recent[Uses] = Recent(4)


def _part(root: Region, uses: Uses, span: ModuleSpan, inside: frozenset[str]) -> Part | None:
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
    return Part(
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
