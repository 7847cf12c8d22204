"""Do what the plan says: recompute, compile, then ``fully_shard`` in the plan's order, then methods and flags.

Everything that torch would decide by itself is passed: the mesh, each unit's reshard flag (the root's too), the
precision, and where a parameter is sharded along another dim than 0. Recompute stands first because its hooks have to
run inside those of ``fully_shard``: parameters are gathered before a module recomputes. ``Module.compile`` compiles a
module's call with these hooks in it, and changes neither names nor classes; the graph that it makes is the same before
and after ``fully_shard``, whose own hooks torch does not trace.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from autoshard.errors import ApplyError
from autoshard.plan import Decisions, Unit
from autoshard.runtime.buffers import Lost, fill_after_to_empty, require_filled
from autoshard.runtime.dtypes import mixed_precision
from autoshard.runtime.follow import belongings, follow
from autoshard.runtime.match import Matched
from autoshard.runtime.replicated import AverageReplicated
from autoshard.runtime.root_calls import RootCalls, reshard_after_evaluation

TORCH_ERRORS = (RuntimeError, ValueError, AssertionError, NotImplementedError, TypeError, AttributeError, IndexError)
"""What ``fully_shard`` and its neighbours raise on what they do not support."""


def apply(model: nn.Module, plan: Decisions, matched: Matched, mesh: DeviceMesh, lost: Sequence[Lost] = ()) -> None:
    """Apply a plan in place.

    Args:
        model: the root.
        plan: what to do.
        matched: the plan's names as objects of this model.
        mesh: the mesh to shard over.
        lost: non-persistent buffers on meta, to fill when the model gets memory.

    Raises:
        ApplyError: torch refused; the model may be partly sharded then and cannot be used.
    """
    for fqn in plan.recompute:
        _guarded((fqn,), "recompute", checkpoint, model.get_submodule(fqn))
    for fqn in plan.compile:
        _guarded((fqn,), "compile", model.get_submodule(fqn).compile)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed_precision(plan.precision)}
    if matched.replicated:
        _move(matched.replicated.values(), mesh)
        options["ignored_params"] = set(matched.replicated.values())
    carried = belongings(model, matched.owned)
    for unit, modules, owned in zip(plan.units, matched.units, matched.owned, strict=True):
        classes = [type(module) for module in modules]
        target = list(modules) if len(modules) > 1 else modules[0]
        _guarded(
            unit.modules,
            "shard",
            fully_shard,
            target,
            reshard_after_forward=unit.reshard,
            shard_placement_fn=_placement(unit, owned),
            **options,
        )
        for module, original in zip(modules, classes, strict=True):
            _keep_type_name(type(module), original)
    follow(model, plan, carried, registered_methods(plan))
    for fqn, name in registered_methods(plan):
        _guarded((fqn,), "methods", register_fsdp_forward_method, model.get_submodule(fqn), name)
    assert isinstance(model, FSDPModule)
    if plan.reduce_unused:
        _guarded(("",), "flags", model.set_reduce_scatter_unused_params, True)
    kept = [modules[0] for unit, modules in zip(plan.units, matched.units, strict=True) if not unit.reshard]
    fill_after_to_empty(model, lost)
    replicated = AverageReplicated(model, plan.replicated, mesh)
    around = RootCalls((require_filled(lost), replicated.before), (replicated.after, reshard_after_evaluation(kept)))
    around.install(model, [name for fqn, name in registered_methods(plan) if fqn == ""])


def _keep_type_name(sharded: type, original: type) -> None:
    """Let the class that ``fully_shard`` gives to a module print as the module's own class does.

    Code looks classes up by ``type(module).__name__`` and ``str(type(module))``. transformers keeps by the latter which
    outputs a model records, and a model that is a unit would silently record none: no hidden states, no auxiliary loss
    of its experts.
    """
    sharded.__module__, sharded.__qualname__ = original.__module__, original.__qualname__
    sharded.__name__ = original.__name__


def _move(params: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """To the mesh's device, as ``fully_shard`` does with the parameters that it shards."""
    for param in params:
        if param.device.type not in ("meta", mesh.device_type):
            param.data = param.data.to(mesh.device_type)


def registered_methods(plan: Decisions) -> tuple[tuple[str, str], ...]:
    """The methods to register, as (module, method): those of the plan, and its entry on the root."""
    named = [(method.module, method.method) for method in plan.methods]
    if plan.entry != "forward":
        named.append(("", plan.entry))
    return tuple(dict.fromkeys(named))


def _placement(unit: Unit, owned: dict[str, nn.Parameter]) -> Callable[[nn.Parameter], Shard | None] | None:
    if not unit.shard_dims:
        return None
    dims = {owned[key]: dim for key, dim in unit.shard_dims.items()}
    return lambda param: Shard(dims[param]) if param in dims else None


def _guarded(modules: Sequence[str], phase: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except TORCH_ERRORS as error:
        raise ApplyError(tuple(modules), phase, f"{type(error).__name__}: {error}") from error
