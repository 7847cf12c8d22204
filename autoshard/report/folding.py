"""Many names that differ in their numbers, as one: ``model.layers.{0..125}``.

A name stands for a tuple of FQNs (the modules of a unit). Two names fold if they differ only in parts that are
numbers. The numbers of names that fold are points of a grid; they are cut into full boxes, and each box is one
pattern, so that a pattern never says more than is there.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

ROOT = "(root)"
_MAX_RUNS = 8
_MAX_MODULES = 5

Point = tuple[int, ...]
Box = tuple[tuple[int, ...], ...]


def fold_names(names: Sequence[tuple[str, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """Patterns, each with the positions in ``names`` that it stands for, in the order of the first of them.

    Examples:
        >>> fold_names([("embed",), ("h.0",), ("h.1",), ("h.2",), ("",)])
        [('embed', (0,)), ('h.{0..2}', (1, 2, 3)), ('(root)', (4,))]
        >>> fold_names([("h.0.a", "h.0.b"), ("h.1.a", "h.1.b")])
        [('h.{0..1}.a, h.{0..1}.b', (0, 1))]
        >>> fold_names([("h.0", "h.1"), ("h.2", "h.3")])
        [('h.{0..3}, 2 in each', (0, 1))]
    """
    runs: dict[tuple[str, int], list[tuple[int, int]]] = {}
    others: dict[tuple[str, ...], dict[Point, list[int]]] = {}
    for position, modules in enumerate(names):
        template, point = _split(modules)
        if _is_run(template, point):
            runs.setdefault((template[0], len(template)), []).append((point[0], position))
        else:
            others.setdefault(template, {}).setdefault(point, []).append(position)
    found = [
        pattern for (template, width), starts in runs.items() for pattern in _run_patterns(template, width, starts)
    ]
    for template, positions in others.items():
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


def _is_run(template: tuple[str, ...], point: Point) -> bool:
    """Several siblings with consecutive numbers, as a list unit of neighbouring blocks has them."""
    is_of_one_kind = len(template) > 1 and len(set(template)) == 1 and len(point) == len(template)
    return is_of_one_kind and all(after == before + 1 for before, after in pairwise(point))


def _run_patterns(template: str, width: int, starts: list[tuple[int, int]]) -> list[tuple[str, tuple[int, ...]]]:
    """Runs of one width that follow each other without a gap are one pattern."""
    chains: list[list[tuple[int, int]]] = []
    for start in sorted(starts):
        if chains and start[0] == chains[-1][-1][0] + width:
            chains[-1].append(start)
        else:
            chains.append([start])
    found = []
    for chain in chains:
        numbers = f"{{{chain[0][0]}..{chain[-1][0] + width - 1}}}"
        each = f", {width} in each" if len(chain) > 1 else ""
        found.append((template.format(numbers) + each, tuple(sorted(position for _, position in chain))))
    return found


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
    texts = ", ".join(template).format(*map(_span, values)).split(", ")
    if len(texts) > _MAX_MODULES:
        texts[2:-1] = [f"… {len(texts) - 3} more"]
    return ", ".join(texts)


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
