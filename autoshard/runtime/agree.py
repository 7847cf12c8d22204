"""All ranks hold the same plan and the same model, or all ranks say so; no rank waits for one that gave up.

FSDP2 itself never compares: ranks with different units hang, or exchange wrong values without an error where sizes
happen to be equal. So before the first collective of the model every rank tells every other what it holds and whether
its own checks passed, and after ``fully_shard`` once more how that went. Both are one small ``all_gather_object``; only
where digests differ, one rank of each of two groups tells in a second one all that it holds.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

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
        lines: what stands behind a digest, line by line; told only where ranks disagree.
    """

    rank: int = -1
    plan: str = ""
    model: str = ""
    differences: tuple[Difference, ...] = ()
    failure: str = ""
    lines: tuple[str, ...] = ()


def report_of(model: nn.Module, plan: Decisions, differences: tuple[Difference, ...]) -> RankReport:
    """The report of this rank."""
    return RankReport(plan=_digest(plan_lines(plan)), model=_digest(model_lines(model)), differences=differences)


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


def require_agreement(
    own: RankReport, reports: Sequence[RankReport], model: nn.Module, plan: Decisions, mesh: DeviceMesh | None
) -> None:
    """Raise, on every rank, if one of them may not go on.

    Args:
        own: the report of this rank.
        reports: the reports of all ranks, as ``exchange`` returns them.
        model: of this rank, to tell what differs.
        plan: of this rank, to tell what differs.
        mesh: over which the reports were exchanged.

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
            found = tuple(tuple(ranks) for ranks in groups.values())
            lines = model_lines(model) if what == "model" else plan_lines(plan)
            raise RankDisagreementError(what, found, _first_difference(found, tuple(lines), mesh))
    if own.differences:
        raise PlanMismatchError(own.differences)
    for report in reports:
        if report.differences:
            elsewhere = tuple(
                Difference(where=f"{one.where} (on rank {report.rank})", planned=one.planned, found=one.found)
                for one in report.differences
            )
            raise PlanMismatchError(elsewhere)


def _first_difference(
    groups: tuple[tuple[int, ...], ...], lines: tuple[str, ...], mesh: DeviceMesh | None
) -> tuple[str, str]:
    """What two groups hold where they differ first. Every rank calls it; one of each group tells its lines."""
    first, second = groups[0][0], groups[1][0]
    told = exchange(RankReport(lines=lines if dist.get_rank() in (first, second) else ()), mesh)
    by_rank = {report.rank: report.lines for report in told}
    pairs = zip_longest(by_rank[first], by_rank[second], fillvalue="nothing more")
    return next(pair for pair in pairs if pair[0] != pair[1])


def _digest(lines: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def plan_lines(plan: Decisions) -> Iterator[str]:
    """What is applied, one decision a line; what a plan says for people may differ."""
    for name in Decisions.__struct_fields__:
        value = getattr(plan, name)
        if isinstance(value, tuple):
            yield f"{name}: {len(value)} of them"
            for index, item in enumerate(value):
                yield from _fields(f"{name}[{index}]", item)
        else:
            yield from _fields(name, value)
    yield f"fingerprint: {plan.fingerprint if isinstance(plan, Plan) else 'none'}"


def _fields(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield from _fields(f"{name}.{field}", getattr(value, field))
    else:
        yield f"{name}: {msgspec.json.encode(value, order='deterministic').decode()}"


def model_lines(model: nn.Module) -> Iterator[str]:
    """Names, ties, shapes, dtypes and ``requires_grad`` in their order.

    The order counts here (not in the fingerprint): ranks that gather the same parameters in another order exchange
    wrong values. The device does not: one rank may hold the weights while the others are on meta.
    """
    first: dict[int, str] = {}
    for key, param in model.named_parameters(remove_duplicate=False):
        shape = "no shape yet" if isinstance(param, UninitializedParameter) else list(param.shape)
        dtype = str(param.dtype).removeprefix("torch.")
        tie = first.setdefault(id(param), key)
        trains = "trained" if param.requires_grad else "frozen"
        yield f"parameter {key} {dtype} {shape} {trains}" + (f" tied to {tie}" if tie != key else "")
    for fqn, _ in model.named_modules(remove_duplicate=False):
        yield f"module {fqn or '(root)'}"
