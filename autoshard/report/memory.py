"""Where the memory of one device goes over a step, from the plan alone: by phase, by maker, along the step."""

from typing import Any

import msgspec

from autoshard.plan import Plan
from autoshard.report.plan_text import format_verdict
from autoshard.report.table import Table, escape, format_table
from autoshard.sizes import format_bytes, format_ns

BAR = 30
"""Characters of the bar that stands for the most that is alive."""


def format_memory(plan: Plan) -> str:
    """Text, without a line break at the end."""
    phases = "\n".join(
        [format_table(phases_table(plan)), *(escape(f"peak at {peak.peak_at}") for peak in plan.projection.phases)]
    )
    others = map(format_table, (parts_table(plan), course_table(plan)))
    return "\n\n".join([format_verdict(plan), phases, *others, _left_out(plan)])


def memory_figures(plan: Plan) -> dict[str, Any]:
    """The same as data: built-in types, names as in the plan file."""
    projection = plan.projection
    return {
        "device": plan.provenance.device,
        "num_devices": plan.num_devices,
        **{
            name: msgspec.to_builtins(getattr(projection, name))
            for name in ("allowed_bytes", "peak_bytes", "peak_at", "steady_bytes", "step_ns", "by_kind")
        },
        "phases": list(msgspec.to_builtins(projection.phases)),
        "parts": list(msgspec.to_builtins(projection.parts)),
        "timeline": list(msgspec.to_builtins(projection.course)),
        "not_modelled": list(projection.not_modelled),
    }


def phases_table(plan: Plan) -> Table:
    """Bytes of each kind at the peak of each phase."""
    phases = plan.projection.phases
    kinds = list(dict.fromkeys(kind for phase in phases for kind in phase.by_kind))
    kinds.sort(key=lambda kind: (-max(phase.by_kind.get(kind, 0) for phase in phases), kind))
    rows = [(kind.replace("_", " "), *(format_bytes(phase.by_kind.get(kind, 0)) for phase in phases)) for kind in kinds]
    sums = (("peak", "peak_bytes"), ("at its end", "end_bytes"))
    rows += [(name, *(format_bytes(getattr(phase, field)) for phase in phases)) for name, field in sums]
    headers = ("kind", *(phase.phase for phase in phases))
    return Table(
        title="memory of one device at the peak of each phase",
        headers=headers,
        rows=tuple(rows) if phases else (),
        numeric=headers[1:],
    )


def parts_table(plan: Plan) -> Table:
    """What the highest peak is made of, the largest part first."""
    projection = plan.projection
    rows = [
        (
            part.kind.replace("_", " "),
            part.where,
            format_bytes(part.num_bytes),
            f"{100 * part.num_bytes / projection.peak_bytes:.1f} %",
        )
        for part in projection.parts
    ]
    return Table(
        title=f"what the peak of {format_bytes(projection.peak_bytes)} is made of ({projection.peak_at})",
        headers=("kind", "made by", "bytes", "of the peak"),
        rows=tuple(rows),
        numeric=("bytes", "of the peak"),
    )


def course_table(plan: Plan) -> Table:
    """The step in stretches, the highest moment of each."""
    course = plan.projection.course
    most = max((stretch.peak_bytes for stretch in course), default=0)
    rows = [
        (
            stretch.peak_at,
            format_ns(stretch.end_ns),
            format_bytes(stretch.peak_bytes),
            "#" * round(BAR * stretch.peak_bytes / most) if most else "",
        )
        for stretch in course
    ]
    return Table(
        title="the step in stretches, the highest moment of each",
        headers=("where", "until", "bytes", ""),
        rows=tuple(rows),
        numeric=("until", "bytes"),
    )


def _left_out(plan: Plan) -> str:
    return "\n".join(["not modelled", *(f"  {what}" for what in plan.projection.not_modelled)])
