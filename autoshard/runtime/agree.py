"""All ranks hold the same plan and the same model, or all ranks say so; no rank waits for one that gave up.

FSDP2 itself never compares: ranks with different units hang, or exchange wrong values without an error where sizes
happen to be equal. So before the first collective of the model every rank tells every other what it holds and whether
its own checks passed, and after ``fully_shard`` once more how that went. Both are one small ``all_gather_object``.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from autoshard.errors import ApplyError, Difference, PlanMismatchError, RankDisagreementError
from autoshard.plan import Decisions, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank holds, and how its checks went.

    Attributes:
        rank: in the default process group; filled in by ``exchange``.
        plan: digest of what the plan does.
        model: digest of the model's parameters and modules, in their order.
        differences: what ``match`` found.
        failure: what stopped this rank otherwise, empty if nothing did.
    """

    rank: int = -1
    plan: str = ""
    model: str = ""
    differences: tuple[Difference, ...] = ()
    failure: str = ""


def report_of(model: nn.Module, plan: Decisions, differences: tuple[Difference, ...]) -> RankReport:
    """The report of this rank."""
    return RankReport(plan=_plan_digest(plan), model=_model_digest(model), differences=differences)


def failed(error: Exception) -> RankReport:
    """The report of this rank when an error ends its work."""
    return RankReport(failure=f"{type(error).__name__}: {error}")


def exchange(report: RankReport, mesh: DeviceMesh | None) -> tuple[RankReport, ...]:
    """The reports of all ranks that shard together, by rank.

    Over the axes of a given mesh one after the other, else over the default process group. Without a process group,
    or with the ``fake`` backend, which moves nothing, the own report is all there is.
    """
    if not dist.is_available() or not dist.is_initialized():
        return (report,)
    reports = [replace(report, rank=dist.get_rank())]
    groups = [None] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]
    for group in groups:
        if dist.get_backend(group) == "fake":
            continue
        gathered: list[list[RankReport]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, reports, group=group)
        reports = [one for part in gathered for one in part]
    return tuple(sorted(reports, key=lambda one: one.rank))


def require_agreement(own: RankReport, reports: Sequence[RankReport]) -> None:
    """Raise, on every rank, if one of them may not go on.

    Args:
        own: the report of this rank.
        reports: the reports of all ranks, as ``exchange`` returns them.

    Raises:
        RankDisagreementError: ranks hold different plans, or different models.
        PlanMismatchError: the plan does not match here, or on another rank.
        ApplyError: a check of another rank ended with some other error.
    """
    for report in reports:
        if report.failure:
            raise ApplyError((), "agree", f"rank {report.rank} could not go on: {report.failure}")
    for what in ("plan", "model"):
        groups: dict[str, list[int]] = {}
        for report in reports:
            groups.setdefault(getattr(report, what), []).append(report.rank)
        if len(groups) > 1:
            raise RankDisagreementError(what, tuple(tuple(ranks) for ranks in groups.values()))
    if own.differences:
        raise PlanMismatchError(own.differences)
    for report in reports:
        if report.differences:
            elsewhere = tuple(
                Difference(where=f"{one.where} (on rank {report.rank})", planned=one.planned, found=one.found)
                for one in report.differences
            )
            raise PlanMismatchError(elsewhere)


def _plan_digest(plan: Decisions) -> str:
    """Digest of what is applied; what a plan says for people may differ."""
    fingerprint = plan.fingerprint if isinstance(plan, Plan) else ""
    driving = (_driving(plan), fingerprint)
    return hashlib.sha256(msgspec.json.encode(driving, order="deterministic")).hexdigest()


def _driving(plan: Decisions) -> Decisions:
    return Decisions(**{name: getattr(plan, name) for name in Decisions.__struct_fields__})


def _model_digest(model: nn.Module) -> str:
    """Digest of names, ties, shapes, dtypes and ``requires_grad`` in their order.

    The order counts here (not in the fingerprint): ranks that gather the same parameters in another order exchange
    wrong values. The device does not: one rank may hold the weights while the others are on meta.
    """
    first: dict[int, int] = {}
    digest = hashlib.sha256()
    for index, (key, param) in enumerate(model.named_parameters(remove_duplicate=False)):
        tie = first.setdefault(id(param), index)
        shape = "lazy" if isinstance(param, UninitializedParameter) else tuple(param.shape)
        digest.update(f"{key}\0{tie}\0{shape}\0{param.dtype}\0{param.requires_grad}\n".encode())
    for fqn, _ in model.named_modules(remove_duplicate=False):
        digest.update(f"{fqn}\n".encode())
    return digest.hexdigest()
