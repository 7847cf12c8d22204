"""The module runs of several traces in one list.

Where inputs take different paths, one region describes the step and the other traces add the runs that it lacks: a
module's second run in one trace and in another are the same run. An added run has no ops, so it has no length; it
stands where the run that preceded it in its own trace ends, or at the start of the run around it.
"""

from collections import Counter
from dataclasses import replace

from autoshard.ir import ModuleSpan, Region


def united_spans(region: Region, other: Region) -> tuple[ModuleSpan, ...]:
    """The runs of ``region``, with those added that only ``other`` has, in the order of their start."""
    spans, names = list(region.spans), _occurrences(region.spans)
    theirs = _occurrences(other.spans)
    for place, name in enumerate(theirs):
        if name in names:
            continue
        around, before = _around(other.spans, place), _before(other.spans, place)
        if before is not None:
            anchor = spans[names.index(theirs[before])]
            forward = anchor.forward[1]
            backward = anchor.backward[0] if anchor.backward else None
            where = 1 + max(names.index(name) for name in theirs[before:place])
            while where < len(spans) and spans[where].forward[0] < forward:
                where += 1
        else:
            anchor = spans[names.index(theirs[around])] if around is not None else region.spans[0]
            forward = anchor.forward[0]
            backward = anchor.backward[1] if anchor.backward else None
            where = names.index(theirs[around]) + 1 if around is not None else 0
        if backward is None:
            backward = _backward_after(spans[where:])
        added = other.spans[place]
        at = None if added.backward is None else (backward, backward)
        spans.insert(where, replace(added, forward=(forward, forward), backward=at))
        names.insert(where, name)
    return tuple(spans)


def _occurrences(spans: tuple[ModuleSpan, ...] | list[ModuleSpan]) -> list[tuple[str, int]]:
    """Each run as its module and how many runs that module had before."""
    seen: Counter[str] = Counter()
    names = []
    for span in spans:
        names.append((span.module, seen[span.module]))
        seen[span.module] += 1
    return names


def _around(spans: tuple[ModuleSpan, ...], place: int) -> int | None:
    """Place of the run in which the run at ``place`` stands."""
    first, end = spans[place].forward
    for outer in reversed(range(place)):
        if spans[outer].forward[0] <= first and end <= spans[outer].forward[1]:
            return outer
    return None


def _before(spans: tuple[ModuleSpan, ...], place: int) -> int | None:
    """Place of the run that ended last inside the same surrounding run before the one at ``place`` began."""
    around = _around(spans, place)
    siblings = [p for p in range(place) if p != around and _around(spans, p) == around]
    return siblings[-1] if siblings else None


def _backward_after(spans: list[ModuleSpan]) -> int:
    """A backward position for a run before these: where the first of them that has a backward ends it."""
    return next((span.backward[1] for span in spans if span.backward is not None), 0)
