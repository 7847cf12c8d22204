"""The tables of a plan: its units, its memory, and what else was considered."""

from collections import Counter
from collections.abc import Callable

from autoshard.plan import Plan, Unit
from autoshard.report.folding import fold_names
from autoshard.report.table import Table
from autoshard.sizes import format_bytes, format_ns


def units_table(plan: Plan) -> Table:
    """The units in the order of application; like units with like decisions are one row."""
    likes: dict[tuple[object, ...], list[int]] = {}
    for position, unit in enumerate(plan.units):
        dims = tuple(sorted(Counter(unit.shard_dims.values()).items()))
        likes.setdefault((unit.num_params, unit.num_bytes, unit.reshard, dims), []).append(position)
    rows = []
    for positions in likes.values():
        for pattern, members in fold_names([plan.units[position].modules for position in positions]):
            rows.append((positions[members[0]], _unit_row(pattern, len(members), plan.units[positions[members[0]]])))
    total = _total_row(plan)
    return Table(
        title=f"units, in the order of application ({len(plan.units)})",
        headers=("unit", "count", "modules", "parameters", "bytes each", "bytes", "after forward"),
        rows=(*(row for _, row in sorted(rows)), total),
        numeric=("count", "modules", "parameters", "bytes each", "bytes"),
    )


def _unit_row(pattern: str, count: int, unit: Unit) -> tuple[str, ...]:
    after = "reshard" if unit.reshard else "keep"
    dims = Counter(unit.shard_dims.values())
    after += "".join(f"; {num} along dim {dim}" for dim, num in sorted(dims.items()))
    return (
        pattern,
        str(count),
        str(len(unit.modules)),
        str(unit.num_params),
        format_bytes(unit.num_bytes),
        format_bytes(unit.num_bytes * count),
        after,
    )


def _total_row(plan: Plan) -> tuple[str, ...]:
    num_modules = sum(len(unit.modules) for unit in plan.units)
    num_params = sum(unit.num_params for unit in plan.units)
    num_bytes = sum(unit.num_bytes for unit in plan.units)
    return ("all", str(len(plan.units)), str(num_modules), str(num_params), "", format_bytes(num_bytes), "")


def memory_table(plan: Plan) -> Table:
    """What the projected peak of one device is made of, and how it stands to the allowance."""
    projection = plan.projection
    known = sorted(projection.by_kind.items(), key=lambda item: (-item[1], item[0]))
    kinds = [(kind.replace("_", " "), size) for kind, size in known if size]
    others = projection.peak_bytes - sum(projection.by_kind.values())
    if others:
        kinds.append(("not attributed", others))
    free = projection.allowed_bytes - projection.peak_bytes
    sums = (
        ("projected peak", projection.peak_bytes),
        ("free" if free >= 0 else "missing", abs(free)),
        ("allowed", projection.allowed_bytes),
        ("between steps", projection.steady_bytes),
    )
    return Table(
        title=f"memory of one device at the peak ({projection.peak_at})",
        headers=("kind", "bytes", "of allowed"),
        rows=tuple(
            (kind, format_bytes(size), _share(size, projection.allowed_bytes)) for kind, size in (*kinds, *sums)
        ),
        numeric=("bytes", "of allowed"),
    )


def alternatives_table(plan: Plan) -> Table:
    """This plan, and beside it what else was considered."""
    step_ns = plan.projection.step_ns
    fits = "fits" if plan.projection.peak_bytes <= plan.projection.allowed_bytes else "does not fit"
    rows = [("this plan", fits, str(len(plan.units)), format_bytes(plan.projection.peak_bytes), format_ns(step_ns), "")]
    for other in plan.alternatives:
        known = other.verdict != "not legal"
        rows.append(
            (
                other.name,
                other.verdict,
                str(other.num_units),
                _if(known, format_bytes, other.peak_bytes),
                _if(known, format_ns, other.step_ns),
                _reasons(other.reasons),
            )
        )
    return Table(
        title="considered",
        headers=("plan", "verdict", "units", "peak", "step", "because"),
        rows=tuple(rows),
        numeric=("units", "peak", "step"),
    )


def _if(known: bool, format_value: Callable[[int], str], value: int) -> str:
    return format_value(value) if known else "–"


def _reasons(reasons: tuple[str, ...]) -> str:
    places: dict[str, list[str]] = {}
    for reason in reasons:
        code, _, where = reason.partition(" ")
        places.setdefault(code, []).append(where)
    texts = [
        f"{code} {', '.join(pattern for pattern, _ in fold_names([(w,) for w in found])[:2])}"
        for code, found in places.items()
    ]
    return "; ".join(texts)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"
