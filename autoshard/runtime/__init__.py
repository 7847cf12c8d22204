"""Plan and model in, sharded model out; and what is measured on it. Needs torch.

``apply_plan`` runs the steps in their order: ``match`` lists every difference before anything changes, ``agree`` makes
sure that all ranks hold the same, ``mesh`` makes the device mesh, ``apply`` does it, ``confirm`` reads it back.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import RequestError
from autoshard.plan import Decisions, require_supported
from autoshard.runtime.agree import exchange, failed, report_of, require_agreement
from autoshard.runtime.apply import apply
from autoshard.runtime.buffers import lost_buffers, warn_of_lost
from autoshard.runtime.collectives import record_collectives
from autoshard.runtime.confirm import confirm
from autoshard.runtime.dryrun import dry_run
from autoshard.runtime.dtypes import mixed_precision
from autoshard.runtime.loop import accumulate, clip_grad_norm_, make_optimizer
from autoshard.runtime.match import match, warn_of_size
from autoshard.runtime.measure import Meter, measure
from autoshard.runtime.mesh import make_mesh
from autoshard.runtime.read import read_plan

__all__ = [
    "Meter",
    "accumulate",
    "apply_plan",
    "clip_grad_norm_",
    "dry_run",
    "make_optimizer",
    "measure",
    "read_plan",
    "record_collectives",
]


def apply_plan(model: nn.Module, plan: Decisions, mesh: DeviceMesh | None = None) -> nn.Module:
    """Shard a model as a plan says, in place. Every rank calls it, before the first forward and the optimizer.

    The model may be on meta: then materialise and initialise it afterwards (``model.to_empty(device=...)``, then the
    model's own initialisation or a state dict). On a CPU mesh equal seeds draw equal slices, so seed by the rank along
    the shard axis first. A warning names the buffers that a state dict would not fill.

    Names of parameters and of the state dict stay as they were; the parameters become ``DTensor``. After a forward
    without gradients all of them are sharded again, so that an optimizer may also be made after an evaluation.

    Args:
        model: the model that the plan was made for, not sharded yet.
        plan: a plan, or the decisions of one, which have no fingerprint to compare.
        mesh: the mesh to shard over, one axis or two (replicate, shard); ``None`` makes it over the default process
            group, which has to exist. A plan of one axis may meet a group of another size, with a warning.

    Returns:
        The same model.

    Raises:
        RequestError: an argument is of another type. Nothing has been changed.
        PlanFormatError: the plan asks for what this release does not apply. Nothing has been changed.
        PlanMismatchError: the plan is for another model or mesh; all differences. Nothing has been changed.
        RankDisagreementError: ranks hold different plans or models; raised on all of them. Nothing has been changed.
        ApplyError: torch refused, or what was read back is not what was planned; raised on all ranks. The model
            cannot be used any more.

    Examples:
        One process as a group of one; under torchrun the group is ``dist.init_process_group()``:

        >>> import torch, torch.distributed as dist, autoshard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> request = autoshard.Request(device="cpu", devices=1)
        >>> plan = autoshard.make_plan(model, inputs=((torch.randn(4, 8),), {}), request=request)
        >>> model = apply_plan(model, plan)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> type(model[0].weight).__name__
        'DTensor'
        >>> dist.destroy_process_group()
    """
    try:
        if not isinstance(plan, Decisions):
            raise RequestError("plan", plan, "a Plan or its Decisions", "read a file with load_plan(path)")
        if not isinstance(model, nn.Module):
            raise RequestError(
                "model", type(model).__name__, "a torch.nn.Module", "give the model first, then the plan"
            )
        require_supported(plan)
        mixed_precision(plan.precision)
        matched, differences = match(model, plan, mesh)
        own = report_of(model, plan, differences)
    except Exception as error:
        exchange(failed(error), mesh)
        raise
    require_agreement(own, exchange(own, mesh), model, plan, mesh)
    assert matched is not None
    warn_of_size(plan, matched.num_shards)
    try:
        lost = lost_buffers(model, plan.rebuilt_buffers)
        warn_of_lost(lost)
        made = make_mesh(model, plan, mesh)
        apply(model, plan, matched, made, lost)
        confirm(model, plan, matched, made)
    except Exception as error:
        exchange(failed(error), mesh)
        raise
    require_agreement(own, exchange(own, mesh), model, plan, mesh)
    return model
