"""Bytes and times of a unit: what FSDP2 allocates and moves for it, from its parameters alone.

FSDP2 pads each parameter by itself: along dim 0 to a multiple of the number of shards, so that a parameter with fewer
rows than shards grows (``_fsdp_param.py``, ``_init_sharded_param``). A parameter sharded along another dim has to
divide evenly and needs a copy on the way in and out. Prices are rounded for each parameter, so that a sum over units
does not depend on how parameters are grouped.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autoshard.analysis.ownership import owners
from autoshard.cost import Group, Rates, copy_ns, start_ns, wire_ns
from autoshard.ir import ModelGraph, ParamInfo
from autoshard.ir.tree import Tree
from autoshard.plan import Decisions, Precision, Unit
from autoshard.request import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What the reduction of one parameter's gradient takes.

    Attributes:
        key: the parameter.
        unsharded_bytes: the whole gradient in the compute dtype.
        reduced_bytes: its part of the reduce-scatter's input: padded, in the dtype of the reduction.
        sharded_bytes: its shard, padded, in the stored dtype.
        is_transposed: sharded along another dim than 0, so it is copied before the reduction.
        wire_ns: its time in the reduce-scatter.
        all_reduce_ns: its time in the all-reduce over replicas.
        copy_ns: time to copy it into the reduce-scatter's input.
    """

    key: str
    unsharded_bytes: int
    reduced_bytes: int
    sharded_bytes: int
    is_transposed: bool
    wire_ns: int
    all_reduce_ns: int
    copy_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One reduction of some of a unit's gradients.

    Attributes:
        unsharded_bytes: the gradients that it frees.
        held_bytes: the part of them that is freed only when the reduction has been issued: the last gradient stays
            referenced by a loop variable of ``foreach_reduce``.
        zeros_bytes: gradients that it makes for parameters that got none.
        transposed_bytes: the largest gradient sharded along another dim than 0: it is copied, one at a time.
        transposed_held_bytes: the last such gradient, which stays alive beside its copy.
        input_bytes: the reduce-scatter's input.
        output_bytes: its output.
        sharded_bytes: the gradient shards in the stored dtype.
        is_cast: the output is cast to the stored dtype, which takes a second buffer.
        dtype: of the reduction.
        reduce_scatter_ns: time of the reduce-scatter.
        all_reduce_ns: time of the all-reduce over replicas, 0 without replicas.
        copy_ns: time to copy the gradients into the input.
    """

    unsharded_bytes: int
    held_bytes: int
    zeros_bytes: int
    transposed_bytes: int
    transposed_held_bytes: int
    input_bytes: int
    output_bytes: int
    sharded_bytes: int
    is_cast: bool
    dtype: str
    reduce_scatter_ns: int
    all_reduce_ns: int
    copy_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    """Bytes and times of one unit.

    Attributes:
        name: its modules, ``(root)`` for the root.
        modules: their FQNs.
        keys: its parameters in the order in which FSDP2 holds them.
        reshard: reshard after forward.
        sharded_bytes: its shards in the stored dtype, padding included.
        unsharded_bytes: its parameters unsharded, in the compute dtype, padding included.
        buffer_bytes: output buffer of its all-gather; 0 where there is one shard.
        cast_bytes: copy of the shards in the compute dtype, alive while the all-gather is issued; with one shard, what
            is alive beyond the unsharded parameters while they are copied one by one.
        transposed_bytes: copies of parameters sharded along another dim than 0, alive during the copy-out.
        gather_dtype: dtype of the all-gather's buffer; ``uint8`` where dtypes are mixed.
        gather_ns: time of its all-gather.
        copy_out_ns: time to copy the buffer into the unsharded parameters.
        gradients: of its trainable parameters.
        reduce_dtype: dtype of the reduction.
        is_reduced_in_other_dtype: the reduction's output is cast to the stored dtype.
        shard_start_ns: start of a collective over the shards.
        replica_start_ns: start of a collective over the replicas, 0 without replicas.
        num_shards: size of the shard axis.
    """

    name: str
    modules: tuple[str, ...]
    keys: tuple[str, ...]
    reshard: bool
    sharded_bytes: int
    unsharded_bytes: int
    buffer_bytes: int
    cast_bytes: int
    transposed_bytes: int
    gather_dtype: str
    gather_ns: int
    copy_out_ns: int
    gradients: tuple[Gradient, ...]
    reduce_dtype: str
    is_reduced_in_other_dtype: bool
    shard_start_ns: int
    replica_start_ns: int
    num_shards: int

    def reduction(self, present: Collection[str], unused: Collection[str] = ()) -> Reduction | None:
        """The reduction of the gradients of these parameters, ``None`` if there are none.

        Args:
            present: keys of parameters that got a gradient.
            unused: keys of parameters that got none and take part with zeros.
        """
        taken = [gradient for gradient in self.gradients if gradient.key in present or gradient.key in unused]
        if not taken:
            return None
        whole = sum(gradient.unsharded_bytes for gradient in taken)
        transposed = [gradient for gradient in taken if gradient.is_transposed and self.num_shards > 1]
        input_bytes = sum(gradient.reduced_bytes for gradient in taken)
        held = taken[-1].unsharded_bytes if self.num_shards > 1 else 0
        if transposed and transposed[-1] is not taken[-1]:
            held += transposed[-1].unsharded_bytes
        return Reduction(
            unsharded_bytes=whole,
            held_bytes=held,
            zeros_bytes=sum(gradient.unsharded_bytes for gradient in taken if gradient.key in unused),
            transposed_bytes=max((gradient.unsharded_bytes for gradient in transposed), default=0),
            transposed_held_bytes=transposed[-1].unsharded_bytes if transposed else 0,
            input_bytes=input_bytes,
            output_bytes=input_bytes // self.num_shards,
            sharded_bytes=sum(gradient.sharded_bytes for gradient in taken),
            is_cast=self.is_reduced_in_other_dtype,
            dtype=self.reduce_dtype,
            reduce_scatter_ns=self.shard_start_ns + sum(gradient.wire_ns for gradient in taken),
            all_reduce_ns=self.replica_start_ns + sum(gradient.all_reduce_ns for gradient in taken),
            copy_ns=sum(gradient.copy_ns for gradient in taken),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What prices a unit: the groups of the mesh and the device's rates.

    Attributes:
        shard: ranks of the shard axis.
        replicate: ranks of the replicate axis.
        rates: of the device.
    """

    shard: Group
    replicate: Group
    rates: Rates


def unit_sizes(graph: ModelGraph, decisions: Decisions, links: Links) -> tuple[UnitSizes, ...]:
    """Bytes and times of each unit, in the order of application."""
    tree = Tree.of(graph)
    owned = owners(graph, [unit.modules for unit in decisions.units], decisions.replicated)
    return tuple(
        _sizes(tree, unit, _in_fsdp_order(tree, unit, keys), decisions, links)
        for unit, keys in zip(decisions.units, owned, strict=True)
    )


def unit_name(modules: Sequence[str]) -> str:
    """Name of a unit for people."""
    return ", ".join(fqn or "(root)" for fqn in modules)


def compute_dtype(param: ParamInfo, precision: Precision) -> str:
    """Dtype in which a parameter is gathered and computed with; only floating point ones are cast."""
    if precision.param == "same" or not is_floating(param.dtype):
        return param.dtype
    return precision.param


def is_floating(dtype: str) -> bool:
    """The dtype is floating point, as torch's ``is_floating_point`` says."""
    return dtype.startswith(("float", "bfloat"))


def _in_fsdp_order(tree: Tree, unit: Unit, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Children's parameters before those of the module (``_fsdp_init.py``, ``_get_managed_modules``)."""
    left = set(keys)
    ordered: list[str] = []
    for root in unit.modules:
        inside = tree.below(tree.canonical(root) or root)
        for fqn in sorted(inside, key=tree.post_index.__getitem__):
            found = [key for key in tree.nodes[fqn].own_params if key in left]
            left.difference_update(found)
            ordered += found
    return tuple(ordered)


def _sizes(tree: Tree, unit: Unit, keys: tuple[str, ...], decisions: Decisions, links: Links) -> UnitSizes:
    precision, num_shards = decisions.precision, decisions.num_shards
    params = [tree.params[key] for key in keys]
    padded = [_padded_numel(param, unit.shard_dims.get(param.key, 0), num_shards) for param in params]
    computed = [compute_dtype(param, precision) for param in params]
    unsharded = [numel * DTYPE_BYTES[dtype] for numel, dtype in zip(padded, computed, strict=True)]
    shards = [numel // num_shards * DTYPE_BYTES[param.dtype] for numel, param in zip(padded, params, strict=True)]
    cast = [
        size // num_shards if dtype != param.dtype else 0
        for size, dtype, param in zip(unsharded, computed, params, strict=True)
    ]
    is_spread = num_shards > 1
    stored = {param.dtype for param in params if param.requires_grad}
    reduce_dtype = _reduce_dtype(params, computed, precision)
    return UnitSizes(
        name=unit_name(unit.modules),
        modules=unit.modules,
        keys=keys,
        reshard=unit.reshard,
        sharded_bytes=sum(shards),
        unsharded_bytes=sum(unsharded),
        buffer_bytes=sum(unsharded) if is_spread else 0,
        cast_bytes=sum(cast) if is_spread else _cast_one_by_one(unsharded, cast),
        transposed_bytes=sum(
            size
            for size, param in zip(unsharded, params, strict=True)
            if unit.shard_dims.get(param.key, 0) and is_spread
        ),
        gather_dtype=computed[0] if len(set(computed)) == 1 else "uint8",
        gather_ns=start_ns(links.shard) + sum(wire_ns(size, links.shard) for size in unsharded),
        copy_out_ns=sum(copy_ns(2 * size, links.rates) for size in unsharded),
        gradients=tuple(
            _gradient(param, numel, dtype, reduce_dtype, bool(unit.shard_dims.get(param.key, 0)), num_shards, links)
            for param, numel, dtype in zip(params, padded, computed, strict=True)
            if param.requires_grad
        ),
        reduce_dtype=reduce_dtype,
        is_reduced_in_other_dtype=bool(stored) and stored != {reduce_dtype},
        shard_start_ns=start_ns(links.shard),
        replica_start_ns=start_ns(links.replicate),
        num_shards=num_shards,
    )


def _cast_one_by_one(unsharded: list[int], cast: list[int]) -> int:
    """With one shard nothing is gathered: each parameter is cast and copied while the cast before is still bound."""
    done = highest = before = 0
    for size, copy in zip(unsharded, cast, strict=True):
        highest = max(highest, done + before + copy, done + size + copy)
        done, before = done + size, copy
    return max(0, highest - done)


def _padded_numel(param: ParamInfo, dim: int, num_shards: int) -> int:
    if dim or not param.shape:
        return param.numel
    rows = param.shape[0]
    return param.numel // rows * (-(-rows // num_shards) * num_shards) if rows else 0


def _reduce_dtype(params: list[ParamInfo], computed: list[str], precision: Precision) -> str:
    if precision.reduce != "same":
        return precision.reduce
    trainable = [dtype for param, dtype in zip(params, computed, strict=True) if param.requires_grad]
    return trainable[0] if trainable else "float32"


def _gradient(
    param: ParamInfo, padded: int, dtype: str, reduce_dtype: str, is_transposed: bool, num_shards: int, links: Links
) -> Gradient:
    whole = param.numel * DTYPE_BYTES[dtype]
    reduced = padded * DTYPE_BYTES[reduce_dtype]
    return Gradient(
        key=param.key,
        unsharded_bytes=whole,
        reduced_bytes=reduced,
        sharded_bytes=padded // num_shards * DTYPE_BYTES[param.dtype],
        is_transposed=is_transposed,
        wire_ns=wire_ns(reduced, links.shard),
        all_reduce_ns=2 * wire_ns(reduced // num_shards, links.replicate),
        copy_ns=copy_ns(whole + reduced, links.rates),
    )
