"""Read from a sharded model what was decided for it: the plan that somebody has applied by hand.

The counterpart of ``apply``: units, reshard flags, precision, shard dims, the mesh, recompute and flags, from FSDP2's
own state. It reads private state of torch, as ``confirm`` does.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from autoshard.errors import RequestError
from autoshard.plan import Axis, Decisions, Method, Precision, Unit
from autoshard.runtime.ownership import unit_digest

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
"""Attributes under which torch's checkpoint wrapper and ``torch.compile`` keep the module that they wrap."""
_REMEDY = "shard the root with fully_shard after its units, over one mesh, and read the plan then"


def read_plan(model: nn.Module) -> Decisions:
    """The decisions that made a sharded model, in the names of the unsharded one.

    Args:
        model: to which ``fully_shard`` was applied, over a real process group or a fake one.

    Returns:
        Decisions that ``apply_plan`` takes and ``compare_plans`` scores. They have no fingerprint and no projection.

    Raises:
        RequestError: the model is not sharded as a whole, or in a way that a plan cannot say: several meshes, a part of
            the shards kept after forward, parameters of a unit over several groups.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> plan = read_plan(fully_shard(torch.nn.Sequential(fully_shard(model[0]), model[1])))
        >>> [unit.modules for unit in plan.units]
        [('0',), ('',)]
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, nn.Module):
        raise RequestError("model", type(model).__name__, "a torch.nn.Module")
    if not isinstance(model, FSDPModule):
        raise RequestError("model", "a root that is not sharded", "a model whose root is sharded too", _REMEDY)
    names = {module: _clean(fqn) for fqn, module in reversed([*model.named_modules()])}
    states = _states(model)
    groups = [group for state in states for group in state._fsdp_param_groups]
    if not groups:
        raise RequestError("model", "units without parameters", "a model with parameters to shard", _REMEDY)
    meshes = [group.mesh_info.mesh for group in groups]
    if any(mesh != meshes[0] for mesh in meshes):
        raise RequestError("model", "units over several meshes", "one mesh for all units", _REMEDY)
    policies = [state._mp_policy for state in states]
    if any(policy != policies[0] for policy in policies):
        raise RequestError("model", "units of several precisions", "one precision for all units", _REMEDY)
    keys = {param: _clean(key) for key, param in model.named_parameters()}
    return Decisions(
        mesh=_mesh(meshes[0]),
        precision=_precision(policies[0]),
        units=tuple(_unit(state, names, keys, is_root=state is states[-1]) for state in states),
        recompute=tuple(dict.fromkeys(_recomputing(model))),
        methods=tuple(_methods(model, names)),
        replicated=tuple(sorted(key for param, key in keys.items() if not isinstance(param, DTensor))),
        reduce_unused=any(group.reduce_scatter_unused_params for group in groups),
    )


def _clean(fqn: str) -> str:
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def _states(model: nn.Module) -> list[Any]:
    """The state of each unit once, children before parents, the root last."""
    found: dict[int, Any] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found.setdefault(id(state), state)

    visit(model)
    root = found.pop(id(model._get_fsdp_state()))  # type: ignore[operator]
    return [*found.values(), root]


def _unit(state: Any, names: dict[nn.Module, str], keys: dict[nn.Parameter, str], *, is_root: bool) -> Unit:
    modules = tuple(names[module] for module in state._modules)
    if len(state._fsdp_param_groups) > 1:
        raise RequestError(
            "model", f"{', '.join(modules)} in several groups", "one group of parameters a unit", _REMEDY
        )
    group = state._fsdp_param_groups[0] if state._fsdp_param_groups else None
    params = [] if group is None else group.fsdp_params
    owned = [_key(param, keys) for param in params]
    after = None if group is None else group.post_forward_mesh_info
    if group is not None and after is not None and after.mesh != group.mesh_info.mesh:
        raise RequestError(
            "model",
            f"{', '.join(modules)}, which reshards over {after.mesh.size()} devices after forward",
            "reshard_after_forward of true or false",
            "an integer costs two process groups for each unit and cannot be planned",
        )
    # Left to torch, the root is the unit that does not reshard.
    reshard = after is not None and not (is_root and state._auto_reshard_after_forward)
    return Unit(
        modules=modules,
        reshard=reshard,
        num_params=len(owned),
        num_bytes=sum(param._orig_size.numel() * param.sharded_param.element_size() for param in params),
        digest=unit_digest(owned),
        shard_dims={
            key: param.fsdp_placement.dim
            for key, param in sorted(zip(owned, params, strict=True), key=lambda item: item[0])
            if param.fsdp_placement.dim
        },
    )


def _key(param: Any, keys: dict[nn.Parameter, str]) -> str:
    return keys[getattr(param._module_info.module, param._module_info.param_name)]


def _mesh(mesh: DeviceMesh) -> tuple[Axis, ...]:
    shard = Axis(name="shard", size=int(mesh.shape[-1]), role="shard")
    if mesh.ndim == 1:
        return (shard,)
    return (Axis(name="replicate", size=int(mesh.shape[0]), role="replicate"), shard)


def _precision(policy: MixedPrecisionPolicy) -> Precision:
    def name(dtype: torch.dtype | None) -> str:
        return "same" if dtype is None else str(dtype).removeprefix("torch.")

    return Precision(
        param=name(policy.param_dtype),
        reduce=name(policy.reduce_dtype),
        output=name(policy.output_dtype),
        cast_inputs=policy.cast_forward_inputs,
    )


def _recomputing(model: nn.Module) -> Iterator[str]:
    """Modules under torch's composable checkpoint or its wrapper, in the order of the tree."""
    for fqn, module in model.named_modules():
        if hasattr(module, "_checkpoint_wrapped_module") or getattr(checkpoint.state(module), "enable_hook", False):
            yield _clean(fqn)


def _methods(model: nn.Module, names: dict[nn.Module, str]) -> Iterator[Method]:
    """Methods that ``register_fsdp_forward_method`` has put on a unit."""
    for module, fqn in sorted(names.items(), key=lambda item: item[1]):
        if isinstance(module, FSDPModule):
            for name, value in sorted(vars(module).items()):
                code = getattr(getattr(value, "__func__", None), "__code__", None)
                if code is not None and code.co_name == "wrapped_method":
                    yield Method(module=fqn, method=name)
