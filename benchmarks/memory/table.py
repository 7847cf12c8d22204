"""The tables of ``make bench-memory``, from its lines."""

import statistics
from typing import Any

from tabulate import tabulate

from benchmarks.memory.configurations import CONFIGURATIONS, TRACKED

Line = dict[str, Any]
LARGE = 0.01
"""Part of the peak from which on a kind counts by itself."""


def errors(line: Line) -> dict[str, float]:
    """Projected minus measured by phase, as a part of the step's measured peak."""
    whole = max(line["measured"].values())
    return {phase: (line["projected"][phase] - line["measured"][phase]) / whole for phase in line["measured"]}


def kind_errors(line: Line) -> dict[str, float]:
    """Projected minus measured by kind, as a part of the measured kind, for the kinds that count."""
    projected, measured = line["kinds_projected"], line["kinds_measured"]
    whole = sum(measured.values())
    return {
        kind: projected.get(kind, 0) / measured[kind] - 1 if kind in measured else float("inf")
        for kind in {**projected, **measured}
        if max(projected.get(kind, 0), measured.get(kind, 0)) > LARGE * whole
    }


def peak_error(line: Line) -> float:
    """Error of the step's peak, as a part of it."""
    return max(line["projected"].values()) / max(line["measured"].values()) - 1


def format_results(lines: list[Line]) -> str:
    """The tables and the sums."""
    measured = [line for line in lines if line["state"] == "measured"]
    numbers = {one.name: number for number, one in enumerate(CONFIGURATIONS, 1)}
    names = [name for name in numbers if any(line["configuration"] == name for line in measured)]
    found = {(line["model"], line["configuration"]): errors(line) for line in measured}
    rows = []
    for model in dict.fromkeys(line["model"] for line in lines):
        cell = [found.get((model, name)) for name in names]
        rows.append([model, *("–" if one is None else _worst(one) for one in cell)])
    text = ["error of the projected peaks by model and configuration: the worst of the three phases, in %", ""]
    text += [f"  {numbers[name]:>2}  {name}" for name in names]
    text += [
        "",
        tabulate(rows, headers=["", *map(str, map(numbers.get, names))], stralign="right", disable_numparse=True),
    ]
    every = [error for one in found.values() for error in one.values()]
    peaks = [peak_error(line) for line in measured]
    kinds = [error for line in measured for error in kind_errors(line).values()]
    if every:
        text += [
            "",
            f"{len(measured)} cells, {len(every)} peaks of phases, {len(kinds)} kinds at the peak",
            _summary("peak of the step", peaks),
            _summary("peak of a phase", every),
            _summary("a kind at the peak", kinds),
            _furthest(measured),
            f"a projection takes {1000 * statistics.median(line['project_seconds'] for line in measured):.2f} ms of "
            "CPU (median; the profile of the step once before)",
        ]
    text += _peer_lines(lines, measured)
    failed = [line for line in lines if line["state"] == "failed"]
    text += ["", *(f"failed: {line['model']} ({line['configuration']}): {line['message']}" for line in failed)]
    return "\n".join(text).rstrip()


def _furthest(measured: list[Line]) -> str:
    """Where a kind is furthest off."""
    found = [(abs(error), kind, line) for line in measured for kind, error in kind_errors(line).items()]
    _, kind, line = max(found, key=lambda one: one[0])
    return f"  the furthest is {kind.replace('_', ' ')} of {line['model']} ({line['configuration']})"


def _peer_lines(lines: list[Line], measured: list[Line]) -> list[str]:
    ours = {line["model"]: line for line in measured if line["configuration"] == TRACKED}
    rows = []
    for line in lines:
        if line["state"] != "tracked" or line["model"] not in ours:
            continue
        own = ours[line["model"]]
        peak = max(own["measured"].values())
        row = [line["model"], peak, _percent(peak_error(own))]
        for name in ("warmed", "cold"):
            row.append(_percent(line[name] / peak - 1) if line[name] else line[f"{name}_error"][:60])
        row.append(_percent(line["calculator"] / peak - 1) if line["calculator"] else "no rule")
        rows.append(row)
    if not rows:
        return []
    headers = ["", "measured bytes", "projected", "tracker, warmed", "tracker, cold", "calculator"]
    title = f"beside torch's FSDPMemTracker and a calculator, error of the step's peak ({TRACKED})"
    return ["", title, "", tabulate(rows, headers=headers, stralign="right", disable_numparse=True)]


def _summary(name: str, found: list[float]) -> str:
    return (
        f"{name}: median {_percent(statistics.median(map(abs, found)))}, lowest {_percent(min(found))}, "
        f"highest {_percent(max(found))}"
    )


def _worst(by_phase: dict[str, float]) -> str:
    return f"{100 * max(by_phase.values(), key=abs):+.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:+.3f} %"
