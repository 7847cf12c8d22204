"""Is this model, on this mesh, the one that the plan was made for? All differences at once, and nothing is changed.

What a plan holds is compared piece by piece (modules, methods, each unit's parameters, the mesh), so that a difference
is named where it is; the fingerprint catches the rest (shapes, dtypes, ``requires_grad``, ties, buffers). What
``fully_shard`` would refuse half-way through a model is looked for here as well, because it cannot be undone there.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from autoshard.capture import fingerprint_items
from autoshard.errors import Difference
from autoshard.plan import Decisions, Plan, fingerprint
from autoshard.runtime.extras import added_params
from autoshard.runtime.mesh import found_num_shards, mesh_differences
from autoshard.runtime.ownership import Ownership, holders, ownership, unit_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A plan's names as objects of one model.

    Attributes:
        units: the module objects of each unit, in the order of application.
        owned: the parameters of each unit by key, before they are sharded.
        replicated: parameters that no unit shards, by key.
        places: FQNs of each parameter by key, the key first.
        num_shards: size of the shard axis that is there.
    """

    units: tuple[tuple[nn.Module, ...], ...]
    owned: tuple[dict[str, nn.Parameter], ...]
    replicated: dict[str, nn.Parameter]
    places: dict[str, tuple[str, ...]]
    num_shards: int


def match(model: nn.Module, plan: Decisions, mesh: DeviceMesh | None) -> tuple[Matched | None, tuple[Difference, ...]]:
    """The plan's objects in the model, or every difference.

    Args:
        model: on a device or on meta, not sharded yet.
        plan: a plan, or decisions alone, which have no fingerprint to compare.
        mesh: the mesh to shard over, ``None`` for the default process group.

    Returns:
        The match and no differences, or ``None`` and all differences.
    """
    mesh_found = mesh_differences(plan, mesh)
    names_found = _missing_names(model, plan)
    sharded = _already_sharded(model)
    if names_found or sharded:
        return None, (*mesh_found, *names_found, *sharded)
    modules = dict(model.named_modules(remove_duplicate=False))
    units = tuple(tuple(modules[fqn] for fqn in unit.modules) for unit in plan.units)
    owned = ownership(model, units, plan.replicated)
    found = [*mesh_found, *_unit_differences(plan, owned), *_refused(plan, units, owned)]
    num_shards = 0
    if not mesh_found:
        num_shards = found_num_shards(plan, mesh)
        found += _shard_dim_differences(plan, owned, num_shards)
    found += _fingerprint_difference(model, plan)
    if found:
        return None, tuple(found)
    named = holders(model)
    return (
        Matched(
            units=units,
            owned=owned.params,
            replicated={key: named[key][0] for key in plan.replicated},
            places={key: tuple(place.fqn for place in places) for key, (_, places) in named.items()},
            num_shards=num_shards,
        ),
        (),
    )


def warn_of_size(plan: Decisions, num_shards: int) -> None:
    """Say once, on the first rank, that a plan of one axis meets a group of another size."""
    if num_shards != plan.num_shards and dist.get_rank() == 0:
        warnings.warn(
            f"this plan was made for {plan.num_shards} devices and is applied to {num_shards}: it stays right, but "
            f"what it projects (memory, time) holds for {plan.num_shards}",
            UserWarning,
            stacklevel=3,
        )


def _missing_names(model: nn.Module, plan: Decisions) -> list[Difference]:
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted = [(f"units[{i}]", fqn) for i, unit in enumerate(plan.units) for fqn in unit.modules]
    wanted += [(f"recompute[{i}]", fqn) for i, fqn in enumerate(plan.recompute)]
    wanted += [(f"compile[{i}]", fqn) for i, fqn in enumerate(plan.compile)]
    found = [
        Difference(where=fqn or "(root)", planned=f"a module ({field})", found="no module of that name")
        for field, fqn in wanted
        if fqn not in modules
    ]
    methods = [(method.module, method.method) for method in plan.methods]
    if plan.entry != "forward":
        methods.append(("", plan.entry))
    for fqn, name in methods:
        if fqn not in modules:
            found.append(Difference(where=fqn, planned=f"a module with the method {name}", found="no such module"))
        elif not callable(getattr(modules[fqn], name, None)):
            kind = type(modules[fqn]).__name__
            found.append(Difference(where=fqn or "(root)", planned=f"a method {name}", found=f"{kind} without it"))
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name in plan.rebuilt_buffers:
        if name not in buffers:
            found.append(Difference(where=name, planned="a buffer to rebuild", found="no buffer of that name"))
    keys = holders(model)
    for key in plan.replicated:
        if key not in keys:
            found.append(Difference(where=key, planned="a replicated parameter", found="no parameter of that name"))
    if not plan.units or plan.units[-1].modules != ("",):
        last = ", ".join(plan.units[-1].modules) if plan.units else "no unit"
        found.append(Difference(where="units", planned="the root as the last unit", found=last))
    return found


def _already_sharded(model: nn.Module) -> list[Difference]:
    planned = "a model that is not sharded yet"
    for fqn, module in model.named_modules():
        if isinstance(module, FSDPModule):
            return [Difference(where=fqn or "(root)", planned=planned, found="fully_shard was applied already")]
    dtensors = [key for key, param in model.named_parameters() if isinstance(param, DTensor)]
    if dtensors:
        return [Difference(where=dtensors[0], planned=planned, found=f"{len(dtensors)} parameters that are DTensors")]
    lazy = [key for key, param in model.named_parameters() if isinstance(param, UninitializedParameter)]
    return [
        Difference(where=key, planned="a parameter with a shape", found="a lazy parameter: run one forward first")
        for key in lazy
    ]


def _unit_differences(plan: Decisions, owned: Ownership) -> list[Difference]:
    found = [
        Difference(where=key, planned="a parameter of one unit", found=f"reached by several, as {', '.join(places)}")
        for key, places in owned.split.items()
    ]
    found += [Difference(where=key, planned="a parameter of a unit", found="in no unit") for key in owned.left_out]
    for unit, params in zip(plan.units, owned.params, strict=True):
        where = ", ".join(fqn or "(root)" for fqn in unit.modules)
        num_bytes = sum(param.nbytes for param in params.values())
        added = added_params(unit, params)
        found += [
            Difference(
                where=key, planned="no such parameter", found=f"one of shape {tuple(params[key].shape)} in {where}"
            )
            for key in added
        ]
        if len(params) != unit.num_params:
            found.append(_of_unit(where, f"{unit.num_params} parameters", f"{len(params)} parameters"))
        if num_bytes != unit.num_bytes:
            found.append(_of_unit(where, f"{unit.num_bytes} bytes of parameters", f"{num_bytes} bytes"))
        if len(params) == unit.num_params and unit_digest(params) != unit.digest:
            found.append(_of_unit(where, "parameters of other names", ", ".join(sorted(params)[:4])))
        found += [
            Difference(where=key, planned=f"a parameter of {where} (shard_dims)", found="not one of its parameters")
            for key in unit.shard_dims
            if key not in params
        ]
    return found


def _refused(plan: Decisions, units: Sequence[Sequence[nn.Module]], owned: Ownership) -> list[Difference]:
    """What ``fully_shard`` raises on, when it is too late to go back."""
    found = []
    for unit, modules, params in zip(plan.units, units, owned.params, strict=True):
        for fqn, module in zip(unit.modules, modules, strict=True):
            container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
            if container and type(module).forward is nn.Module.forward:
                found.append(_of_unit(fqn, "a module with a forward", f"{type(module).__name__} without one"))
        for key, param in params.items():
            if param.ndim == 0:
                found.append(Difference(where=key, planned="a parameter to shard", found="a scalar"))
            elif not param.is_contiguous():
                found.append(Difference(where=key, planned="a contiguous parameter", found=f"strides {param.stride()}"))
        dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in params.values() if param.requires_grad})
        if len(dtypes) > 1:
            where = ", ".join(fqn or "(root)" for fqn in unit.modules)
            found.append(_of_unit(where, "trainable parameters of one dtype", ", ".join(dtypes)))
    return found


def _shard_dim_differences(plan: Decisions, owned: Ownership, num_shards: int) -> list[Difference]:
    found = []
    for unit, params in zip(plan.units, owned.params, strict=True):
        for key, dim in unit.shard_dims.items():
            shape = tuple(params[key].shape) if key in params else None
            if shape is None:
                continue
            if not 0 <= dim < len(shape):
                found.append(Difference(where=key, planned=f"sharded along dim {dim}", found=f"shape {shape}"))
            elif dim and shape[dim] % num_shards:
                planned = f"sharded along dim {dim}"
                size = f"{shape[dim]} there, which {num_shards} devices do not divide"
                found.append(Difference(where=key, planned=planned, found=size))
    return found


def _fingerprint_difference(model: nn.Module, plan: Decisions) -> list[Difference]:
    if not isinstance(plan, Plan):
        return []
    found = fingerprint(fingerprint_items(model), plan.named_modules)
    if found == plan.fingerprint:
        return []
    hint = "a shape, dtype, requires_grad or tie of a parameter, or a buffer's name, is another"
    return [Difference(where="fingerprint", planned=plan.fingerprint, found=f"{found} ({hint})")]


def _of_unit(where: str, planned: str, found: str) -> Difference:
    return Difference(where=f"unit {where}", planned=planned, found=found)
