"""What would make an infeasible request feasible, each with its number."""

from dataclasses import replace

from autoshard.analysis.space import Analysis
from autoshard.ir import ModelGraph
from autoshard.planner.candidate import Candidate, decide
from autoshard.request import Question
from autoshard.simulate import Timeline, simulate
from autoshard.sizes import format_bytes

MAX_DOUBLINGS = 5


def remedies(
    graph: ModelGraph, analysis: Analysis, question: Question, smallest: Candidate, timeline: Timeline
) -> tuple[str, ...]:
    """The nearest changes that would do: more memory, more devices, a smaller input; each was priced."""
    found = [f"--memory {format_bytes(timeline.peak_bytes).replace(' ', '')} or more per device"]
    device = question.profile
    if timeline.peak_bytes > device.memory_bytes - device.headroom_bytes:
        found[0] += f" ({device.name} has {format_bytes(device.memory_bytes - device.headroom_bytes)} after headroom)"
    found += _more_devices(graph, analysis, question, smallest)
    activations = timeline.by_kind.get("activations", 0)
    missing = timeline.peak_bytes - question.allowed_bytes
    if activations >= missing:
        found.append(
            f"a smaller batch or sequence: activations are {format_bytes(activations)} of the peak, "
            f"{format_bytes(missing)} less would do"
        )
    return tuple(found)


def _more_devices(graph: ModelGraph, analysis: Analysis, question: Question, smallest: Candidate) -> list[str]:
    for doubling in range(1, MAX_DOUBLINGS + 1):
        more = replace(question, num_shards=question.num_shards * 2**doubling)
        decisions = decide(graph, analysis.space, more, smallest)
        peak_bytes = simulate(graph, decisions, more).peak_bytes
        if peak_bytes <= question.allowed_bytes:
            return [f"--devices {more.num_devices}: projected peak {format_bytes(peak_bytes)}"]
    return []
