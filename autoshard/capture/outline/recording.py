"""A recording: what one block does in forward and backward, in its own names and numbers."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from autoshard.capture.outline.arguments import Form, Layout
from autoshard.capture.outline.pairing import Pairing
from autoshard.capture.spans import Span
from autoshard.capture.storages import Gradient
from autoshard.capture.values import KnownValue
from autoshard.ir import OpNode

Role = Literal["own", "argument", "buffer", "gradient"]


class Piece(NamedTuple):
    """A storage of a recording.

    Attributes:
        nbytes: its size.
        kind: as in ``StorageRecord``.
        born_phase: phase in which it appeared.
        born: index of the op during which it did.
        died_phase: phase in which the block let go of it, ``ALIVE`` if it has not.
        died: index of the last op before that, -1 before the first.
        role: whose it is; ``gradient`` is one that comes in from what follows.
        place: which of the arguments' storages, of the block's tensors, or of the gradients that come in.
    """

    nbytes: int
    kind: str
    born_phase: str
    born: int
    died_phase: str
    died: int
    role: Role
    place: int


class Result(NamedTuple):
    """One tensor of the block's result.

    Attributes:
        source: the argument itself, a view of its storage, or a tensor on a storage of the recording.
        number: number of the argument, or of the storage.
        layout: of the tensor.
        value: its known value and where that comes from.
    """

    source: Literal["argument", "storage"]
    number: int
    layout: Layout
    value: KnownValue | None


class Event(NamedTuple):
    """What one node of the block's backward gives to gradients of arguments.

    Attributes:
        position: number of backward ops before.
        span: number of the module run that made the node, -1 for none.
        parts: for each edge, the argument, the storage and the layout of what is given.
    """

    position: int
    span: int
    parts: tuple[tuple[int, int, Layout], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a block does, in its own names and numbers.

    Attributes:
        fqn: the block.
        forward: its ops.
        backward: its ops; recomputation included, what autograd adds up for the arguments left out.
        backward_spans: for each backward op the number of its module run, -1 for none.
        pieces: its storages, by number.
        spans: its module runs, the block's own first.
        parents: for each run the number of the one around it, -1 for the block's own.
        makers: number of the run that made a storage.
        form: of the result.
        results: the tensors of the result.
        leaving: numbers of the results that get a gradient.
        incoming: layouts of the gradients that come in, in the order of ``leaving``.
        used: arguments that require a gradient and are read in forward, by the number of their storage.
        events: what is given to gradients of arguments, in order.
        grads: gradients of the block's parameters.
        sparse: keys of those that are sparse.
        readers: stacks by parameter.
        written: keys of the parameters that the forward wrote to.
        written_tensors: which of the block's own tensors it wrote to.
        drops: FQNs of the modules with random dropout.
        recomputed: FQNs of the modules that recompute.
        assumed: what had to be assumed.
        params: keys of the parameters that it reads.
        modules: FQNs of the replayed blocks inside.
    """

    fqn: str
    forward: tuple[OpNode, ...]
    backward: tuple[OpNode, ...]
    backward_spans: tuple[int, ...]
    pieces: tuple[Piece, ...]
    spans: tuple[Span, ...]
    parents: tuple[int, ...]
    makers: dict[int, int]
    form: Form
    results: tuple[Result, ...]
    leaving: tuple[int, ...]
    incoming: tuple[Layout, ...]
    used: tuple[int, ...]
    events: tuple[Event, ...]
    grads: dict[str, Gradient]
    sparse: frozenset[str]
    readers: dict[str, tuple[tuple[str, ...], ...]]
    written: tuple[str, ...]
    written_tensors: tuple[int, ...]
    drops: tuple[str, ...]
    recomputed: tuple[str, ...]
    assumed: tuple[tuple[str, str, str], ...]
    params: tuple[str, ...]
    modules: tuple[str, ...]


def differences(one: Recording, other: Recording, pairing: Pairing) -> str:
    """In what a second block's recording differs from the first's, which stands for it; empty if in nothing."""
    ops = {
        "forward": [_renamed(op, pairing) for op in one.forward] == list(other.forward),
        "backward": [_renamed(op, pairing) for op in one.backward] == list(other.backward),
        "storages": one.pieces == other.pieces,
        "results": (one.form, [r[:3] for r in one.results]) == (other.form, [r[:3] for r in other.results]),
        "gradients": (one.events, one.incoming) == (other.events, other.incoming),
        "module runs": [_facts(span, pairing.modules) for span in one.spans] == [_facts(s, {}) for s in other.spans],
    }
    return ", ".join(name for name, is_same in ops.items() if not is_same)


def _renamed(op: OpNode, pairing: Pairing) -> OpNode:
    return OpNode(
        target=op.target,
        module=pairing.modules.get(op.module, op.module),
        inputs=op.inputs,
        outputs=op.outputs,
        params=tuple(pairing.params.get(key, key) for key in op.params),
        flops=op.flops,
        bytes_read=op.bytes_read,
        bytes_written=op.bytes_written,
        is_view=op.is_view,
        is_recompute=op.is_recompute,
    )


def _facts(span: Span, names: dict[str, str]) -> tuple[Any, ...]:
    return (
        names.get(span.module, span.module),
        *(getattr(span, name) for name in Span.__slots__ if name not in ("module", "parent")),
    )
