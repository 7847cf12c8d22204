"""Folded names say exactly what is there: each pattern, written out again, gives its names and no other."""

import doctest
import itertools
import random
import re

import pytest

from autoshard.report import folding
from autoshard.report.folding import fold_names


def expand(pattern: str) -> set[str]:
    """The names behind a pattern that has no places tied to each other, by another way than the code's."""
    pieces = re.split(r"(\{[^}]*\})", pattern)
    choices = []
    for piece in pieces:
        if not piece.startswith("{"):
            choices.append([piece])
            continue
        values: list[str] = []
        for run in piece[1:-1].split(","):
            bounds = [int(number) for number in run.split("..")]
            step = bounds[2] if len(bounds) == 3 else 1
            values += map(str, range(bounds[0], bounds[1] + 1, step)) if len(bounds) > 1 else [run]
        choices.append(values)
    return {"".join(parts) for parts in itertools.product(*choices)}


def folded(*names: str) -> list[str]:
    return [pattern for pattern, _ in fold_names([(name,) for name in names])]


def test_equal_blocks_are_one() -> None:
    names = [f"model.layers.{i}" for i in range(126)]
    assert fold_names([(name,) for name in names]) == [("model.layers.{0..125}", tuple(range(126)))]


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        ([""], ["(root)"]),
        (["head"], ["head"]),
        (["h.7"], ["h.7"]),
        (["h.0", "h.1"], ["h.{0..1}"]),
        (["h.3", "h.7"], ["h.{3,7}"]),
        (["h.0", "h.2", "h.4"], ["h.{0..4..2}"]),
        (["h.0", "h.1", "h.2", "h.9"], ["h.{0..2,9}"]),
        (["h.10", "h.9", "h.8"], ["h.{8..10}"]),
        (["a.0", "b.0", "a.1"], ["a.{0..1}", "b.0"]),
        (["h.0.x", "h.0.y", "h.1.x", "h.1.y"], ["h.{0..1}.x", "h.{0..1}.y"]),
        (["h.0.e.0", "h.0.e.1", "h.1.e.0", "h.1.e.1"], ["h.{0..1}.e.{0..1}"]),
        (["h.0.e.0", "h.0.e.1", "h.1.e.0", "h.1.e.2"], ["h.0.e.{0..1}", "h.1.e.{0,2}"]),
        (["h.01", "h.1"], ["h.01", "h.1"]),
        (["h.{0}", "h.1"], ["h.{0}", "h.1"]),
        (["0", "1", "2"], ["{0..2}"]),
        (["h." + "9" * 5000], ["h." + "9" * 5000]),
        ([], []),
    ],
)
def test_patterns(names: list[str], patterns: list[str]) -> None:
    assert folded(*names) == patterns


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        ([("norm", "head")], ["norm, head"]),
        ([("h.0.a", "h.0.b"), ("h.1.a", "h.1.b")], ["h.{0..1}.a, h.{0..1}.b"]),
        ([("h.0", "h.1"), ("h.2", "h.3"), ("h.4", "h.5")], ["h.{0..5}, 2 in each"]),
        ([("h.0", "h.1", "h.2")], ["h.{0..2}"]),
        ([("h.0", "h.1"), ("h.4", "h.5"), ("h.6", "h.7")], ["h.{0..1}", "h.{4..7}, 2 in each"]),
        ([("h.0", "h.1", "h.2"), ("h.3", "h.4")], ["h.{0..2}", "h.{3..4}"]),
        ([("h.0", "h.2"), ("h.1", "h.3")], ["h.{0..1}, h.{2..3}"]),
        ([("h.1", "h.0")], ["h.1, h.0"]),
        ([("a", "b", "c", "d", "e", "f", "g")], ["a, b, … 4 more, g"]),
        ([("h.0", "g.1"), ("h.1", "g.0")], ["h.0, g.1", "h.1, g.0"]),
    ],
)
def test_patterns_of_list_units(names: list[tuple[str, ...]], patterns: list[str]) -> None:
    assert [pattern for pattern, _ in fold_names(names)] == patterns


def test_long_lists_are_cut_with_their_number() -> None:
    names = [f"h.{i * i}" for i in range(30)]
    assert folded(*names) == ["h.{0..1,4,9,16,25,36,49,64,… 30 in all}"]


@pytest.mark.parametrize("seed", range(200))
def test_each_pattern_says_what_is_there(seed: int) -> None:
    rng = random.Random(seed)
    depth = rng.randint(1, 3)
    points = {tuple(rng.randrange(4) for _ in range(depth)) for _ in range(rng.randint(1, 20))}
    names = [".".join(f"p{place}.{value}" for place, value in enumerate(point)) for point in points]
    rng.shuffle(names)
    seen: list[int] = []
    for pattern, members in fold_names([(name,) for name in names]):
        stands_for = {names[member] for member in members}
        # With places tied to each other (x.0.y.1, x.1.y.2) the pattern shows the values of each place alone.
        values = {tuple(re.findall(r"\d+", re.sub(r"p\d", "p", name))) for name in stands_for}
        is_grid = len(values) == len(set(itertools.product(*map(set, zip(*values, strict=True)))))
        if is_grid:
            assert expand(pattern) == stands_for
        else:
            assert stands_for < expand(pattern)
        seen += members
    assert sorted(seen) == list(range(len(names)))


def test_the_examples_hold() -> None:
    assert doctest.testmod(folding) == doctest.TestResults(failed=0, attempted=3)
