"""Many names that differ in their numbers, as one: ``model.layers.{0..125}``.

A name stands for a tuple of FQNs (the modules of a unit). Two names fold if they differ only in parts that are
numbers. The numbers of names that fold are points of a grid; they are cut into full boxes, and each box is one
pattern, so that a pattern never says more than is there.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

ROOT = "(root)"
_MAX_RUNS = 8

Point = tuple[int, ...]
Box = tuple[tuple[int, ...], ...]


def fold_names(names: Sequence[tuple[str, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """Patterns, each with the positions in ``names`` that it stands for, in the order of the first of them.

    Examples:
        >>> fold_names([("embed",), ("h.0",), ("h.1",), ("h.2",), ("",)])
        [('embed', (0,)), ('h.{0..2}', (1, 2, 3)), ('(root)', (4,))]
        >>> fold_names([("h.0.a", "h.0.b"), ("h.1.a", "h.1.b")])
        [('h.{0..1}.a, h.{0..1}.b', (0, 1))]
    """
    families: dict[tuple[str, ...], dict[Point, list[int]]] = {}
    for position, modules in enumerate(names):
        template, point = _split(modules)
        families.setdefault(template, {}).setdefault(point, []).append(position)
    found = []
    for template, positions in families.items():
        for values, points in _patterns(list(positions)):
            members = sorted(position for point in points for position in positions[point])
            found.append((_text(template, values), tuple(members)))
    return sorted(found, key=lambda pattern: pattern[1])


def _split(modules: tuple[str, ...]) -> tuple[tuple[str, ...], Point]:
    template, point = [], []
    for fqn in modules:
        parts = fqn.split(".") if fqn else [ROOT]
        # "007" is a name and not the number 7, which is written otherwise.
        numbers = [part for part in parts if part.isdecimal() and len(part) < 10 and part == str(int(part))]
        point += [int(part) for part in numbers]
        template.append(
            ".".join("{}" if part in numbers else part.replace("{", "{{").replace("}", "}}") for part in parts)
        )
    return tuple(template), tuple(point)


def _patterns(points: list[Point]) -> Iterator[tuple[list[tuple[int, ...]], list[Point]]]:
    """For each box: the values at each place of the template, and its points."""
    # A place that keeps its distance from an earlier one says nothing new: h.{0..3}.a, h.{0..3}.b.
    leaders: list[tuple[int, int]] = []
    for place in range(len(points[0])):
        for leader in range(place):
            offset = points[0][place] - points[0][leader]
            if leaders[leader][0] == leader and all(point[place] - point[leader] == offset for point in points):
                leaders.append((leader, offset))
                break
        else:
            leaders.append((place, 0))
    free = [place for place, (leader, _) in enumerate(leaders) if leader == place]
    by_free = {tuple(point[place] for place in free): point for point in points}
    for box in _boxes(sorted(by_free)):
        values = dict(zip(free, box, strict=True))
        shown = [tuple(value + offset for value in values[leader]) for leader, offset in leaders]
        yield shown, [by_free[corner] for corner in _corners(box)]


def _boxes(points: list[Point]) -> list[Box]:
    if not points[0]:
        return [()]
    rests: dict[int, list[Point]] = {}
    for first, *rest in points:
        rests.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[Point, ...], list[int]] = {}
    for first, rest_points in rests.items():
        alike.setdefault(tuple(rest_points), []).append(first)
    return [(tuple(firsts), *box) for rest_points, firsts in alike.items() for box in _boxes(list(rest_points))]


def _corners(box: Box) -> list[Point]:
    corners: list[Point] = [()]
    for values in box:
        corners = [(*corner, value) for corner in corners for value in values]
    return corners


def _text(template: tuple[str, ...], values: list[tuple[int, ...]]) -> str:
    return ", ".join(template).format(*map(_span, values))


def _span(values: tuple[int, ...]) -> str:
    if len(values) == 1:
        return str(values[0])
    step = values[1] - values[0]
    if len(values) > 2 and step > 1 and all(b - a == step for a, b in pairwise(values)):
        return f"{{{values[0]}..{values[-1]}..{step}}}"
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs[:_MAX_RUNS]]
    more = [f"… {len(values)} in all"] if len(runs) > _MAX_RUNS else []
    return "{" + ",".join(texts + more) + "}"
