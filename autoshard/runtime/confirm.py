"""Read back from FSDP2's own state that the sharded model is what the plan says.

Who owns what, reshard flags, precision, shard dims, the mesh, recompute, methods, flags; that ties hold, that no
parameter was left out and that no name changed. It reads private state of torch, on purpose and in this file alone:
what was asked for and what is there are two things.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from autoshard.errors import ApplyError
from autoshard.plan import Decisions, Unit
from autoshard.runtime.apply import registered_methods
from autoshard.runtime.dtypes import mixed_precision
from autoshard.runtime.match import Matched


def confirm(model: nn.Module, plan: Decisions, matched: Matched, mesh: DeviceMesh) -> None:
    """Compare the sharded model with the plan.

    Args:
        model: to which ``apply`` applied the plan.
        plan: what was to be done.
        matched: names, owners and ties before anything was done.
        mesh: the mesh that was sharded over.

    Raises:
        ApplyError: something is not as planned; all findings of the first unit (or of the whole model) in one reason.
    """
    policy = mixed_precision(plan.precision)
    key_of = {param: key for key, param in model.named_parameters()}
    for unit, modules, owned in zip(plan.units, matched.units, matched.owned, strict=True):
        _require(unit.modules, list(_unit_findings(key_of, plan, unit, modules, set(owned), policy, mesh)))
    _require((), list(_model_findings(model, plan, matched)))


def _unit_findings(
    key_of: dict[nn.Parameter, str],
    plan: Decisions,
    unit: Unit,
    modules: tuple[nn.Module, ...],
    keys: set[str],
    policy: MixedPrecisionPolicy,
    mesh: DeviceMesh,
) -> Iterator[str]:
    for fqn, module in zip(unit.modules, modules, strict=True):
        if not isinstance(module, FSDPModule):
            yield f"{fqn or '(root)'} is not sharded"
            return
    states = [_state(module) for module in modules]
    if any(state is not states[0] for state in states):
        yield "its modules are not one unit"
        return
    state = states[0]
    if set(state._modules) != set(modules):
        yield "the unit has other modules than the plan's"
    if state._auto_reshard_after_forward:
        yield "reshard was left to torch"
    if state._mp_policy != policy:
        yield f"the precision is {state._mp_policy}"
    groups = state._fsdp_param_groups
    if len(groups) > 1:
        yield f"its parameters are in {len(groups)} groups"
    params = {_key(key_of, param): param for group in groups for param in group.fsdp_params}
    if set(params) != keys:
        yield f"it owns {_some(set(params) - keys)} and lacks {_some(keys - set(params))}"
    for group in groups:
        if (group.post_forward_mesh_info is not None) != unit.reshard:
            yield f"reshard is {group.post_forward_mesh_info is not None}, planned {unit.reshard}"
        if group.mesh_info.mesh != mesh:
            yield f"it is sharded over {group.mesh_info.mesh}"
        if group.reduce_scatter_unused_params != plan.reduce_unused:
            yield f"reduce_unused is {group.reduce_scatter_unused_params}"
    for key, param in params.items():
        planned = unit.shard_dims.get(key, 0)
        if param.fsdp_placement.dim != planned:
            yield f"{key} is sharded along dim {param.fsdp_placement.dim}, planned {planned}"


def _model_findings(model: nn.Module, plan: Decisions, matched: Matched) -> Iterator[str]:
    now: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    expected = {fqn for places in matched.places.values() for fqn in places}
    if set(now) != expected:
        yield f"parameters appeared: {_some(set(now) - expected)}; vanished: {_some(expected - set(now))}"
        return
    for key, places in matched.places.items():
        untied = [fqn for fqn in places if now[fqn] is not now[key]]
        if untied:
            yield f"{key} is no longer tied to {', '.join(untied)}"
        if isinstance(now[key], DTensor) == (key in matched.replicated):
            yield f"{key} is {'replicated' if key in matched.replicated else 'sharded'} in the plan only"
    for fqn in plan.recompute:
        if not checkpoint.state(model.get_submodule(fqn)).enable_hook:
            yield f"{fqn} does not recompute"
    for fqn in plan.compile:
        if model.get_submodule(fqn)._compiled_call_impl is None:
            yield f"{fqn} is not compiled"
    for fqn, name in registered_methods(plan):
        if name not in vars(model.get_submodule(fqn)):
            yield f"the method {name} of {fqn or '(root)'} is not registered"


def _state(module: nn.Module) -> Any:
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def _key(key_of: dict[nn.Parameter, str], param: Any) -> str:
    """Key of a parameter that FSDP2 knows by module object and name."""
    now = getattr(param._module_info.module, param._module_info.param_name)
    return key_of.get(now, "(a parameter outside the model)")


def _some(keys: set[str]) -> str:
    shown = ", ".join(sorted(keys)[:4])
    return f"{shown} and {len(keys) - 4} more" if len(keys) > 4 else shown or "nothing"


def _require(modules: tuple[str, ...], findings: list[str]) -> None:
    if findings:
        raise ApplyError(modules, "confirm", "; ".join(findings))
