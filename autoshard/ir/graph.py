"""The IR: one training step of one model as data, without torch.

A ``ModelGraph`` lists modules and parameters in full (names and sizes) and describes the step as *regions* (the ops
and storages of one piece of the step, written once) and *calls* (where a region stands). The root is a region whose
ops are the whole step where nothing was outlined. Within a region a *moment* is a phase and the index of an op of
that phase; positions between ops are the indices ``0 … len(ops)``.
"""

from dataclasses import dataclass, field
from typing import Literal

from autoshard.errors import Diagnostic

Phase = Literal["forward", "backward", "caller"]
StorageKind = Literal["activation", "gradient", "temporary", "output", "input", "buffer"]
Frontend = Literal["trace", "tree"]

LOSS = "(loss)"
"""Stands for the code after the root's forward, in place of a module's FQN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point in a region: the op of a phase, or ``caller`` (index 0) for what happens outside the region.

    Attributes:
        phase: which list of ops ``index`` counts in.
        index: index of the op during which it happens.
    """

    phase: Phase
    index: int = 0


CALLER = Moment(phase="caller")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    """One module object of the tree.

    Attributes:
        fqn: its first path in registration order; the root is ``""``. This is the module's one name.
        aliases: further paths to the same object.
        class_name: qualified name of its class, for people only.
        parent: FQN of the module under which ``fqn`` stands; the root's parent is ``""``.
        children: canonical FQNs of its child modules in registration order (a shared child stands under each parent).
        own_params: keys of the parameters registered on the module itself (a tied one under its key).
        own_buffers: names of the buffers registered on the module itself.
        has_forward: its class defines a forward.
        num_calls: how often its hooked forward ran in the step.
        repeat_class: digest of its structure (class, shapes, dtypes, requires_grad, scalar attributes, children);
            equal digests are isomorphic modules.
        traits: facts that rules ask for: ``script``, ``lazy``, ``batch-statistics``, ``dropout``, ``multihead``,
            ``checkpointed`` (recomputes by itself), ``conditional`` (only some of the example inputs run it),
            ``by-chance`` and ``by-value`` (other random numbers or other data change how often or in which order it
            runs), ``exact-type`` (the step does something else if its class is exchanged for a derived one), sorted.
    """

    fqn: str
    aliases: tuple[str, ...] = ()
    class_name: str
    parent: str
    children: tuple[str, ...]
    own_params: tuple[str, ...]
    own_buffers: tuple[str, ...]
    has_forward: bool
    num_calls: int
    repeat_class: str
    traits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """One parameter object.

    Attributes:
        key: its first FQN.
        aliases: further FQNs of the same object (ties by identity).
        shape: global shape.
        dtype: stored dtype name, as in ``request.DTYPE_BYTES``.
        nbytes: bytes of the whole parameter as stored.
        requires_grad: it trains.
        contiguous: its memory layout is contiguous.
        holders: canonical FQNs of all modules that register it, in pre-order; the first is its owner in the tree.
        readers: distinct stacks of hooked forwards (canonical FQNs, outermost first) that were running when an op
            consumed it; ``(LOSS,)`` for the code after the root's forward; empty if nothing reads it.
        gets_grad: the step produced a gradient for it.
        traits: facts that rules ask for: ``dtensor``, ``sparse-grad``, ``complex``, ``shares-storage``,
            ``written-in-forward``, ``read-by-alias`` (the step reads it through a second reference), ``conditional``
            (only some inputs, random numbers or data read it), ``grad-hook`` and ``accumulated-hook`` (hooks were set
            on it), sorted.
        kept_in: places outside the module tree that keep a second reference to it or to its memory, and that do not
            follow when the registered parameter is replaced; the one that the step reads comes first.
    """

    key: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    requires_grad: bool
    contiguous: bool = True
    holders: tuple[str, ...]
    readers: tuple[tuple[str, ...], ...]
    gets_grad: bool
    traits: tuple[str, ...] = ()
    kept_in: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """FQN of the module that holds it first."""
        return self.holders[0]

    @property
    def numel(self) -> int:
        """Number of elements."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferInfo:
    """One buffer.

    Attributes:
        name: its first FQN.
        shape: its shape.
        dtype: dtype name.
        nbytes: bytes.
        persistent: it is part of the state dict.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    persistent: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageInfo:
    """One piece of memory that the step allocated; parameters and their shards are not listed.

    Attributes:
        nbytes: its size.
        born: op that allocated it, or ``CALLER``.
        dies: last op during which it was alive, or ``CALLER`` if it outlives the region.
        kind: ``activation`` lives from forward into backward, ``temporary`` within one phase, ``gradient`` is the
            whole gradient of a parameter, ``output`` leaves the region, ``input`` came from the caller, ``buffer``
            belongs to the model.
        param: key of the parameter whose gradient it is, else ``""``.
    """

    nbytes: int
    born: Moment
    dies: Moment
    kind: StorageKind
    param: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpNode:
    """One op of a region.

    Attributes:
        target: qualified name of the op, such as ``aten.mm.default``.
        module: FQN of the innermost module that was running (for backward: whose forward made the node), or ``LOSS``.
        inputs: indices of the region's storages that it reads.
        outputs: indices of the region's storages that it writes.
        params: keys of the parameters that it reads.
        flops: floating point operations.
        bytes_read: bytes of the tensors that it reads.
        bytes_written: bytes of the tensors that it writes; 0 for a view.
        is_view: it moves no data.
        is_recompute: it runs forward code again during backward.
    """

    target: str
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[str, ...] = ()
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    is_view: bool = False
    is_recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpan:
    """One run of a module's hooked forward, and its backward, as positions in the region's ops.

    Attributes:
        module: FQN.
        forward: first and past-the-end position of its forward ops, submodules included.
        backward: first and past-the-end position of its backward ops; ``None`` if it has none.
        inputs_need_grad: some tensor that FSDP2 finds in its arguments requires grad.
        output_needs_grad: some tensor that FSDP2 finds in its result requires grad.
        output_kind: ``tensor``, ``tuple``, ``list``, ``dict``, ``dataclass``, ``none``, or ``opaque:`` and the class
            of a result (or of a part of it) in which FSDP2 finds no tensors.
        output_is_view: some tensor of its result is a view of another tensor.
        input_bytes: bytes of the distinct storages of the tensors in its arguments.
        output_bytes: bytes of the distinct storages of the tensors in its result.
        escapes: a tensor that requires grad was made inside and used after the run, but FSDP2 does not find it in
            the result (it left in an object of its own, or was stored somewhere).
        changes_input: an op inside changed a tensor of its arguments in place, of which FSDP2 would pass on a view.
        early_params: keys of the parameters that backward reads for this run before a hook on its result has fired
            (FSDP2's hook would gather them), or without one.
    """

    module: str
    forward: tuple[int, int]
    backward: tuple[int, int] | None
    inputs_need_grad: bool
    output_needs_grad: bool
    output_kind: str
    output_is_view: bool = False
    input_bytes: int = 0
    output_bytes: int = 0
    escapes: bool = False
    changes_input: bool = False
    early_params: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeRead:
    """Where a forward asks a parameter of another module for its dtype and brings a tensor to it.

    Nothing is copied in the trace, where parameters have the compute dtype. Where the parameter is sharded it has its
    stored one: the tensor is copied to it, and back where it enters the parameter's unit.

    Attributes:
        param: its key.
        module: FQN of the module that asks.
        position: forward op before which it asks.
        stored_bytes: bytes of the copy in the stored dtype.
        stored_stop: past-the-end forward position up to which it is held.
        cast_bytes: bytes of the tensor as it was, if the caller holds it beside its copy, else 0.
        cast_stop: past-the-end forward position up to which that is held.
    """

    param: str
    module: str
    position: int
    stored_bytes: int
    stored_stop: int
    cast_bytes: int
    cast_stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Where a region stands inside its caller.

    Attributes:
        region: name of the region that runs here.
        module: FQN of the module for which it stands (the region's own FQNs are the representative's).
        forward: position in the caller's forward ops.
        backward: position in the caller's backward ops; ``None`` if it has no backward.
        borders: pairs of storage indices (in the region, in the caller) that are the same memory.
    """

    region: str
    module: str
    forward: int
    backward: int | None
    borders: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The ops and storages of one piece of the step.

    Attributes:
        name: unique name; ``root`` for the root.
        module: FQN of the module (the representative) that it describes.
        forward: ops in order; for the root the loss included.
        backward: ops in order, recomputation included.
        storages: what the ops read and write, by index.
        spans: the module runs inside the region, in the order of their start, outer before inner.
        calls: the regions called from here, in forward order.
        dtype_reads: where parameters are asked for their dtype from outside, in order.
    """

    name: str
    module: str
    forward: tuple[OpNode, ...]
    backward: tuple[OpNode, ...]
    storages: tuple[StorageInfo, ...]
    spans: tuple[ModuleSpan, ...]
    calls: tuple[Call, ...] = ()
    dtype_reads: tuple[DtypeRead, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputInfo:
    """One tensor of the example inputs.

    Attributes:
        name: argument position or keyword, with the path inside it.
        shape: its shape.
        dtype: dtype name.
        same_as: name of an earlier input that is the same tensor, else ``""``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    same_as: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """How blocks of one form were traced. It says nothing of the step itself.

    Attributes:
        module: FQN of the block that was recorded, or of the first that is traced in full.
        num_blocks: modules of its form.
        num_replayed: how many of them were written down from the recording, itself included.
        reason: why blocks of this form are traced in full, empty if they are not.
    """

    module: str
    num_blocks: int
    num_replayed: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """One training step of one model.

    Attributes:
        frontend: ``trace`` (the step was run on fake tensors) or ``tree`` (module tree alone: no ops, no order).
        entry: the root's method that runs the step, ``forward`` by default.
        loss: how the loss was found, for people.
        compute_dtype: dtype that floating point parameters and inputs had in the trace.
        inputs: tensors of the example inputs.
        modules: pre-order of the tree, each object once; the first is the root.
        params: in the order of ``named_parameters``.
        buffers: in the order of ``named_buffers``.
        regions: the root's region last, callees before callers; empty for ``tree``.
        diagnostics: what capture had to say.
        outlines: how it was traced; two graphs of one step are equal however that was.
    """

    frontend: Frontend
    entry: str
    loss: str
    compute_dtype: str
    inputs: tuple[InputInfo, ...]
    modules: tuple[ModuleNode, ...]
    params: tuple[ParamInfo, ...]
    buffers: tuple[BufferInfo, ...]
    regions: tuple[Region, ...]
    diagnostics: tuple[Diagnostic, ...] = ()
    outlines: tuple[Outline, ...] = field(default=(), compare=False)

    @property
    def root(self) -> Region:
        """The region of the whole step. Only for ``trace``."""
        return self.regions[-1]
