"""Bytes and times of a unit: what FSDP2 allocates and moves for it, from its parameters alone.

FSDP2 pads each parameter by itself: along dim 0 to a multiple of the number of shards, so that a parameter with fewer
rows than shards grows (``_fsdp_param.py``, ``_init_sharded_param``). A parameter sharded along another dim has to
divide evenly and needs a copy on the way in and out. Prices are rounded for each parameter, so that a sum over units
does not depend on how parameters are grouped.
"""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
from msgspec.structs import replace

from autoshard.analysis.ownership import canonical, owners
from autoshard.cost import Group, Rates, Wires, all_reduce_wires, copy_ns, fastest_ns, gather_wires, scatter_wires
from autoshard.ir import ModelGraph
from autoshard.ir.tree import Tree
from autoshard.plan import Decisions, Precision, Unit
from autoshard.request import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What the reduction of one parameter's gradient takes.

    Attributes:
        unsharded_bytes: the whole gradient in the compute dtype.
        kept_bytes: the whole gradient as it is kept from one micro-batch to the next: in the dtype of the reduction.
        reduced_bytes: its part of the reduce-scatter's input: padded, in the dtype of the reduction.
        sharded_bytes: its shard, padded, in the stored dtype.
        is_transposed: sharded along another dim than 0, so it is copied before the reduction.
        wires: its time in the reduce-scatter, for each of the ways to run one.
        all_reduce_wires: its time in the all-reduce over replicas, for each of the ways to run one.
        copy_ns: time to copy it into the reduce-scatter's input.
    """

    unsharded_bytes: int
    kept_bytes: int
    reduced_bytes: int
    sharded_bytes: int
    is_transposed: bool
    wires: Wires
    all_reduce_wires: Wires
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


class UnitSizes(msgspec.Struct, frozen=True, kw_only=True):
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
        copy_in_ns: time to cast its shards and copy them into the all-gather's buffer.
        gather_ns: time of its all-gather.
        copy_out_ns: time to copy the buffer into the unsharded parameters.
        gradients: of its trainable parameters, by key, in the order of ``keys``.
        reduce_dtype: dtype of the reduction.
        is_reduced_in_other_dtype: the reduction's output is cast to the stored dtype.
        shard: the shard axis.
        replicate: the replicate axis.
        is_kept_in_other_dtype: whole gradients that are kept over micro-batches are cast to the dtype of the reduction.
        reductions: those that were asked for already, by the places of the parameters; shared by units with like ones.
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
    copy_in_ns: int
    gather_ns: int
    copy_out_ns: int
    gradients: tuple[tuple[str, Gradient], ...]
    reduce_dtype: str
    is_reduced_in_other_dtype: bool
    shard: Group
    replicate: Group
    is_kept_in_other_dtype: bool
    reductions: dict[tuple[tuple[int, ...], tuple[int, ...], bool], Reduction | None]

    @property
    def num_shards(self) -> int:
        """Size of the shard axis."""
        return self.shard.num_ranks

    def reduction(
        self, present: Collection[str], unused: Collection[str] = (), *, are_kept: bool = False
    ) -> Reduction | None:
        """The reduction of the gradients of these parameters, ``None`` if there are none.

        Args:
            present: keys of parameters that got a gradient.
            unused: keys of parameters that got none and take part with zeros.
            are_kept: the gradients were kept over micro-batches, so they are in the dtype of the reduction.
        """
        places = (
            tuple([place for place, (key, _) in enumerate(self.gradients) if key in present]),
            tuple([place for place, (key, _) in enumerate(self.gradients) if key in unused]) if unused else (),
            are_kept,
        )
        if places not in self.reductions:
            self.reductions[places] = self._reduction(*places)
        return self.reductions[places]

    def _reduction(self, present: tuple[int, ...], unused: tuple[int, ...], are_kept: bool) -> Reduction | None:
        taken = [self.gradients[place][1] for place in sorted({*present, *unused})]
        if not taken:
            return None
        if are_kept:
            taken = [dataclasses.replace(gradient, unsharded_bytes=gradient.kept_bytes) for gradient in taken]
        whole = sum(gradient.unsharded_bytes for gradient in taken)
        transposed = [gradient for gradient in taken if gradient.is_transposed and self.num_shards > 1]
        input_bytes = sum(gradient.reduced_bytes for gradient in taken)
        held = taken[-1].unsharded_bytes if self.num_shards > 1 else 0
        if transposed and transposed[-1] is not taken[-1]:
            held += transposed[-1].unsharded_bytes
        return Reduction(
            unsharded_bytes=whole,
            held_bytes=held,
            zeros_bytes=sum(self.gradients[place][1].unsharded_bytes for place in unused),
            transposed_bytes=max((gradient.unsharded_bytes for gradient in transposed), default=0),
            transposed_held_bytes=transposed[-1].unsharded_bytes if transposed else 0,
            input_bytes=input_bytes,
            output_bytes=input_bytes // self.num_shards,
            sharded_bytes=sum(gradient.sharded_bytes for gradient in taken),
            is_cast=self.is_reduced_in_other_dtype,
            dtype=self.reduce_dtype,
            reduce_scatter_ns=fastest_ns(self.shard.scatters, (gradient.wires for gradient in taken)),
            all_reduce_ns=fastest_ns(self.replicate.all_reduces, (gradient.all_reduce_wires for gradient in taken)),
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
    sizer = Sizer(tree, decisions, links)
    return tuple(
        sizer.sizes(unit, in_fsdp_order(tree, unit, keys)) for unit, keys in zip(decisions.units, owned, strict=True)
    )


def unit_name(modules: Sequence[str]) -> str:
    """Name of a unit for people."""
    return ", ".join(fqn or "(root)" for fqn in modules)


def compute_dtype(dtype: str, precision: Precision) -> str:
    """Dtype in which a parameter stored as ``dtype`` is gathered and computed with; only floating point is cast."""
    return precision.param if precision.param != "same" and is_floating(dtype) else dtype


def is_floating(dtype: str) -> bool:
    """The dtype is floating point, as torch's ``is_floating_point`` says."""
    return dtype.startswith(("float", "bfloat"))


def in_fsdp_order(tree: Tree, unit: Unit, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Member by member, children's parameters before a module's own (``_fsdp_init.py``, ``_get_managed_modules``)."""
    if len(unit.modules) == 1:
        return tuple(sorted(keys, key=tree.held_order.__getitem__))
    ordered: dict[str, None] = {}
    for module in unit.modules:
        inside = frozenset(tree.keys(canonical(tree, module)))
        ordered.update(dict.fromkeys(sorted((key for key in keys if key in inside), key=tree.held_order.__getitem__)))
    return tuple(ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParamSizes:
    """What one parameter adds to its unit; the names are those of ``UnitSizes`` and ``Gradient``."""

    sharded_bytes: int
    unsharded_bytes: int
    cast_bytes: int
    copy_in_ns: int
    wires: Wires
    copy_out_ns: int
    gradient: Gradient


_Kind = tuple[tuple[int, ...], str, bool, int]
"""What the sizes of a parameter depend on, and most parameters of a model share: shape, dtype, trained, shard dim."""


def _param_sizes(
    shape: tuple[int, ...], stored: str, computed: str, reduced: str, dim: int, num_shards: int, links: Links
) -> _ParamSizes:
    """Sizes of a parameter of that shape and dtypes."""
    numel = prod(shape)
    padded = numel
    if not dim and numel:
        padded = numel // shape[0] * (-(-shape[0] // num_shards) * num_shards)
    unsharded = padded * DTYPE_BYTES[computed]
    sharded = padded // num_shards * DTYPE_BYTES[stored]
    whole, reduced_bytes = numel * DTYPE_BYTES[computed], padded * DTYPE_BYTES[reduced]
    return _ParamSizes(
        sharded_bytes=sharded,
        unsharded_bytes=unsharded,
        cast_bytes=unsharded // num_shards if computed != stored else 0,
        copy_in_ns=_copy_in_ns(sharded, unsharded // num_shards, computed != stored, links),
        wires=gather_wires(unsharded, links.shard),
        copy_out_ns=copy_ns(2 * unsharded, links.rates),
        gradient=Gradient(
            unsharded_bytes=whole,
            kept_bytes=numel * DTYPE_BYTES[reduced],
            reduced_bytes=reduced_bytes,
            sharded_bytes=sharded,
            is_transposed=dim != 0,
            wires=scatter_wires(reduced_bytes, links.shard),
            all_reduce_wires=all_reduce_wires(reduced_bytes // num_shards, links.replicate),
            copy_ns=copy_ns(whole + reduced_bytes, links.rates),
        ),
    )


def _copy_in_ns(stored_bytes: int, computed_bytes: int, is_cast: bool, links: Links) -> int:
    """The shards are read and the buffer is written; a cast writes a copy first (``_fsdp_collectives.py``)."""
    if links.shard.num_ranks == 1:
        return 0
    cast_bytes = stored_bytes + computed_bytes if is_cast else 0
    return copy_ns(cast_bytes + 2 * computed_bytes, links.rates)


class Sizer:
    """Sizes of a plan's units; those with like parameters have the same sizes and are summed up once."""

    def __init__(self, tree: Tree, decisions: Decisions, links: Links) -> None:
        self.tree, self.decisions, self.links = tree, decisions, links
        self.params: dict[tuple[_Kind, str], _ParamSizes] = {}
        self.units: dict[tuple[_Kind, ...], UnitSizes] = {}

    def sizes(self, unit: Unit, keys: tuple[str, ...]) -> UnitSizes:
        """Sizes of a unit that holds these parameters."""
        dims, params = unit.shard_dims, [self.tree.params[key] for key in keys]
        kinds = tuple(
            [(param.shape, param.dtype, param.requires_grad, dims.get(param.key, 0) if dims else 0) for param in params]
        )
        like = self.units.get(kinds)
        if like is None:
            like = self.units[kinds] = self._sums(unit, keys, kinds)
        trained = [param.key for param in params if param.requires_grad]
        return replace(
            like,
            name=unit_name(unit.modules),
            modules=unit.modules,
            keys=keys,
            reshard=unit.reshard,
            gradients=tuple([(key, size) for key, (_, size) in zip(trained, like.gradients, strict=True)]),
        )

    def _sums(self, unit: Unit, keys: tuple[str, ...], kinds: tuple[_Kind, ...]) -> UnitSizes:
        num_shards, precision, links = self.decisions.num_shards, self.decisions.precision, self.links
        computed = [compute_dtype(dtype, precision) for _, dtype, _, _ in kinds]
        trained = [is_trained for _, _, is_trained, _ in kinds]
        reduce_dtype = _reduce_dtype(computed, trained, precision)
        sizes = [self._param(kind, dtype, reduce_dtype) for kind, dtype in zip(kinds, computed, strict=True)]
        stored = {dtype for _, dtype, is_trained, _ in kinds if is_trained}
        unsharded = [size.unsharded_bytes for size in sizes]
        cast = [size.cast_bytes for size in sizes]
        is_spread = num_shards > 1
        gradients = tuple((key, size.gradient) for key, size, one in zip(keys, sizes, trained, strict=True) if one)
        return UnitSizes(
            name=unit_name(unit.modules),
            modules=unit.modules,
            keys=keys,
            reshard=unit.reshard,
            sharded_bytes=sum(size.sharded_bytes for size in sizes),
            unsharded_bytes=sum(unsharded),
            buffer_bytes=sum(unsharded) if is_spread else 0,
            cast_bytes=sum(cast) if is_spread else _cast_one_by_one(unsharded, cast),
            transposed_bytes=sum(size.unsharded_bytes for size in sizes if size.gradient.is_transposed and is_spread),
            gather_dtype=computed[0] if len(set(computed)) == 1 else "uint8",
            copy_in_ns=sum(size.copy_in_ns for size in sizes),
            gather_ns=fastest_ns(links.shard.gathers, (size.wires for size in sizes)),
            copy_out_ns=sum(size.copy_out_ns for size in sizes),
            gradients=gradients,
            reduce_dtype=reduce_dtype,
            is_reduced_in_other_dtype=bool(stored) and stored != {reduce_dtype},
            shard=links.shard,
            replicate=links.replicate,
            is_kept_in_other_dtype=any(
                dtype != reduce_dtype for dtype, is_trained in zip(computed, trained, strict=True) if is_trained
            ),
            reductions={},
        )

    def _param(self, kind: _Kind, computed: str, reduced: str) -> _ParamSizes:
        found = self.params.get((kind, reduced))
        if found is None:
            shape, stored, _, dim = kind
            found = _param_sizes(shape, stored, computed, reduced, dim, self.decisions.num_shards, self.links)
            self.params[kind, reduced] = found
        return found


def _cast_one_by_one(unsharded: list[int], cast: list[int]) -> int:
    """With one shard nothing is gathered: each parameter is cast and copied while the cast before is still bound."""
    done = highest = before = 0
    for size, copy in zip(unsharded, cast, strict=True):
        highest = max(highest, done + before + copy, done + size + copy)
        done, before = done + size, copy
    return max(0, highest - done)


def _reduce_dtype(computed: list[str], trained: list[bool], precision: Precision) -> str:
    if precision.reduce != "same":
        return precision.reduce
    return next((dtype for dtype, is_trained in zip(computed, trained, strict=True) if is_trained), "float32")


def averaged_bytes(tree: Tree, decisions: Decisions) -> dict[str, int]:
    """Bytes that average the gradients of replicated parameters, by dtype: the gradients, and a count for each.

    As ``runtime/replicated.py`` lays them out.
    """
    found: dict[str, int] = {}
    for key in decisions.replicated:
        param = tree.params[key]
        if param.requires_grad:
            found[param.dtype] = found.get(param.dtype, 0) + param.nbytes + DTYPE_BYTES[param.dtype]
    return found
