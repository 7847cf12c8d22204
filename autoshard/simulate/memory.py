"""Where the memory of a step goes, in a form that a plan file can hold: phases, parts of the peak, the course.

Nothing here decides anything: it is what people read. The whole timeline, event by event, is in ``Timeline.entries``.
"""

import re
from collections.abc import Iterator
from itertools import chain

from autoshard.ir import LOSS, ModelGraph
from autoshard.plan.schema import Part, PhasePeak, Stretch
from autoshard.simulate.profile import alive_activations
from autoshard.simulate.state import KINDS
from autoshard.simulate.timeline import Entry, Timeline

MAX_PARTS = 16
"""Parts of the peak that are listed; the smallest ones are put together, so that a plan file stays small."""
MAX_STRETCHES = 24
"""Stretches into which the step is cut, a few more where phases are short."""

REST = "(the rest)"

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def phase_peaks(timeline: Timeline) -> tuple[PhasePeak, ...]:
    """The most that is alive in each phase, where, and what it is made of."""
    return tuple(
        PhasePeak(
            phase=summit.phase,
            peak_bytes=summit.high,
            peak_at=timeline.describe(timeline.events[summit.event], summit.high_op),
            end_bytes=summit.end_bytes,
            by_kind=_named(summit.high_live),
        )
        for summit in timeline.summits
    )


def stretches(timeline: Timeline, limit: int = MAX_STRETCHES) -> tuple[Stretch, ...]:
    """The step cut into stretches of about as many events, none across phases: the highest moment of each."""
    size = -(-len(timeline.entries) // limit)
    found = []
    for entries in _chunks(timeline.entries, size):
        highest = max(entries, key=lambda entry: entry.state.high)
        found.append(
            Stretch(
                phase=highest.event.phase,
                peak_bytes=highest.state.high,
                peak_at=timeline.describe(highest.event, highest.state.high_op),
                end_ns=max(entries[-1].state.compute_ns, entries[-1].state.host_ns),
            )
        )
    return tuple(found)


def peak_parts(timeline: Timeline, graph: ModelGraph, limit: int = MAX_PARTS) -> tuple[Part, ...]:
    """What makes the bytes of the peak, the largest first; their sum is the peak.

    Args:
        timeline: the step.
        graph: from which it was made.
        limit: parts that are listed by themselves; what remains of each kind is one part more.
    """
    summit = max(timeline.summits, key=lambda each: each.high)
    sizes: dict[tuple[str, str], int] = {}
    for kind, num_bytes in _named(summit.high_live).items():
        makers = _makers(kind, timeline, graph, summit.event, summit.high_op)
        if sum(makers.values()) > num_bytes:
            makers = {}  # an event in the midst of which the peak stands has freed some of them
        for where, size in makers.items():
            sizes[kind, where] = size
        left = num_bytes - sum(makers.values())
        if left:
            sizes[kind, REST if makers else ""] = left
    ranked = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    shown = [Part(kind=kind, where=where, num_bytes=size) for (kind, where), size in ranked[:limit]]
    small: dict[str, int] = {}
    for (kind, _), size in ranked[limit:]:
        small[kind] = small.get(kind, 0) + size
    return (*shown, *(Part(kind=kind, where=REST, num_bytes=size) for kind, size in sorted(small.items())))


def _named(live: tuple[int, ...]) -> dict[str, int]:
    return {kind: size for kind, size in zip(KINDS, live, strict=True) if size}


def _chunks(entries: tuple[Entry, ...], size: int) -> Iterator[list[Entry]]:
    chunk: list[Entry] = []
    for entry in entries:
        if chunk and (len(chunk) == size or entry.event.phase != chunk[0].event.phase):
            yield chunk
            chunk = []
        chunk.append(entry)
    if chunk:
        yield chunk


def _makers(kind: str, timeline: Timeline, graph: ModelGraph, event: int, op: int) -> dict[str, int]:
    """Bytes of a kind at the peak by what made them; empty where that is not told apart."""
    units = timeline.setup.units
    if kind == "unsharded_params":
        gathered = _alive_units(timeline, event, "copy out", "reshard")
        return _summed((units[unit].name, units[unit].unsharded_bytes) for unit in gathered)
    if kind == "activations":
        return _activations(timeline, graph, event, op)
    return {}


def _alive_units(timeline: Timeline, stop: int, made: str, freed: str) -> set[int]:
    alive: set[int] = set()
    for event in timeline.events[: stop + 1]:
        if event.kind == made:
            alive.add(event.unit)
        elif event.kind == freed and event.is_unsharded:
            alive.discard(event.unit)
    return alive


def _activations(timeline: Timeline, graph: ModelGraph, event: int, op: int) -> dict[str, int]:
    """By the module whose op made them, numbers of repeated modules as ``*``."""
    position = timeline.events[event].start
    alive = alive_activations(graph, timeline.setup.profile.recompute, op=op, position=position)
    moment = op if op >= 0 else position
    copies = (
        (copy.module, copy.num_bytes) for copy in timeline.setup.profile.copies if copy.start <= moment < copy.stop
    )
    return _summed((_place(module), size) for module, size in chain(alive, copies))


def _place(module: str) -> str:
    return "the loss" if module == LOSS else _INDEX.sub("*", module) or "(root)"


def _summed(sizes: Iterator[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for where, size in sizes:
        if size:
            found[where] = found.get(where, 0) + size
    return found
