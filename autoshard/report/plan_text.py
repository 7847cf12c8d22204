"""A plan as text: the verdict in the first line, then the tables, then what was assumed.

Made from the plan alone, so that ``autoshard inspect`` shows of a file what ``autoshard plan`` showed when it made it.
"""

import textwrap

from autoshard.plan import Plan, Precision
from autoshard.plan.save import require_plan
from autoshard.report.findings import format_diagnostics
from autoshard.report.folding import fold_names
from autoshard.report.table import format_table
from autoshard.report.tables import alternatives_table, memory_table, units_table
from autoshard.sizes import format_bytes, format_ns

WIDTH = 120
"""Columns at which running text breaks; tables and names never do."""

_SOUNDNESS = {
    "dry-run": "one step ran dry as sharded",
    "rules": "every rule holds",
    "assumed": "made from the module tree alone, nothing was run",
}


def format_plan(plan: Plan, *, detail: bool = False) -> str:
    """Text of a plan, without a line break at the end.

    Args:
        plan: the plan.
        detail: show notes and every repeated diagnostic too.

    Raises:
        RequestError: it is no plan.

    Examples:
        >>> import torch, autoshard
        >>> request = autoshard.Request(device="cpu", devices=2, memory="1GiB", precision="fp32")
        >>> plan = autoshard.make_plan(torch.nn.Linear(8, 2), inputs=((torch.ones(4, 8),), {}), request=request)
        >>> format_plan(plan).partition(":")[0]
        'cpu × 2'
    """
    require_plan(plan)
    parts = [
        format_verdict(plan),
        "\n".join(_settings(plan)),
        format_table(units_table(plan)),
        format_table(memory_table(plan)),
        format_table(alternatives_table(plan)),
        format_diagnostics(plan.diagnostics, detail=detail),
    ]
    if plan.provenance.assumed:
        parts.append("\n".join(["assumed, because not given", *(f"  {text}" for text in plan.provenance.assumed)]))
    return "\n\n".join(parts)


def format_verdict(plan: Plan) -> str:
    """One line: for which devices, what was assumed, recompute, memory, and how far the plan is proved."""
    assumed = ", ".join(text.partition("=")[0] for text in plan.provenance.assumed)
    projection = plan.projection
    fits = "fits" if projection.peak_bytes <= projection.allowed_bytes else "DOES NOT FIT"
    return (
        f"{plan.provenance.device} × {plan.num_devices}"
        + (f" (assumed: {assumed})" if assumed else "")
        + f": {_count(len(plan.units), 'unit')}, {_recompute(plan)}, {fits}: peak {format_bytes(projection.peak_bytes)}"
        f" of {format_bytes(projection.allowed_bytes)} allowed"
        f"; soundness: {plan.soundness}; optimal: {plan.optimal.status}"
        + (f" (gap {100 * plan.optimal.gap:.2f} %)" if plan.optimal.status == "bounded" else "")
    )


def _settings(plan: Plan) -> list[str]:
    projection = plan.projection
    collectives = [
        f"{format_bytes(size)} in {_count(num, name)}"
        for num, name, size in (
            (projection.num_all_gathers, "all-gather", projection.all_gather_bytes),
            (projection.num_reduce_scatters, "reduce-scatter", projection.reduce_scatter_bytes),
            (projection.num_all_reduces, "all-reduce", projection.all_reduce_bytes),
        )
        if num
    ]
    lines = {
        "mesh": ", ".join(f"{axis.size} to {axis.role} (axis {axis.name})" for axis in plan.mesh),
        "precision": _precision(plan.precision),
        "optimizer": plan.provenance.optimizer,
        "entry": plan.entry,
        "loss": plan.provenance.loss,
        "inputs": "; ".join(plan.provenance.inputs),
        "recompute": ", ".join(pattern for pattern, _ in fold_names([(name,) for name in plan.recompute])),
        "compile": ", ".join(pattern for pattern, _ in fold_names([(name,) for name in plan.compile])),
        "methods": ", ".join(f"{method.module or '(root)'}:{method.method}" for method in plan.methods),
        "replicated": ", ".join(pattern for pattern, _ in fold_names([(key,) for key in plan.replicated])),
        "step": f"{format_ns(projection.step_ns)}, of which {format_ns(projection.exposed_ns)} wait for communication",
        "collectives": ", ".join(collectives),
        "not modelled": "; ".join(projection.not_modelled),
        "soundness": f"{plan.soundness}: {_SOUNDNESS[plan.soundness]}",
        "optimal": f"{plan.optimal.status}: {_optimal(plan)}",
    }
    width = max(map(len, lines)) + 2
    return [
        textwrap.fill(
            text,
            WIDTH,
            initial_indent=f"{name:{width}}",
            subsequent_indent=" " * width,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in lines.items()
        if text
    ]


def _precision(precision: Precision) -> str:
    param = "as stored" if precision.param == "same" else f"in {precision.param}"
    reduce = "as computed" if precision.reduce == "same" else f"in {precision.reduce}"
    output = "" if precision.output == "same" else f", outputs cast to {precision.output}"
    inputs = "" if precision.cast_inputs else ", inputs not cast"
    return f"parameters computed {param}, gradients reduced {reduce}{output}{inputs}"


def _optimal(plan: Plan) -> str:
    optimal = plan.optimal
    if optimal.status == "proved":
        known = "no plan is faster"
    elif optimal.status == "bounded":
        known = (
            f"at most {100 * optimal.gap:.2f} % slower than the best, which takes {format_ns(optimal.bound_ns)} or more"
        )
    else:
        known = "no bound was computed"
    return f"{known}, under this cost model, within: {optimal.space}"


def _recompute(plan: Plan) -> str:
    num = len(plan.recompute)
    return f"{_count(num, 'block')} {'recomputes' if num == 1 else 'recompute'}" if num else "no block recomputes"


def _count(num: int, name: str) -> str:
    return f"{num} {name}" if num == 1 else f"{num} {name}s"
