"""Modules that stand in no other one of a set: by who contains whom, not by the letters of their names."""

from autoshard.analysis.repeats import outermost
from tests.graphs import build, mod


def test_a_shared_module_is_inside_each_parent() -> None:
    shared = mod("part", w=(2,))
    graph = build(mod("", mod("a", shared, w=(3,)), mod("b", shared, w=(5,)), mod("bare", w=(7,))))
    assert outermost(graph, {"a.part", "b"}) == ["b"]
    assert outermost(graph, {"a.part", "bare"}) == ["a.part", "bare"]


def test_a_name_that_begins_alike_is_not_inside() -> None:
    graph = build(mod("", mod("layers", mod("1", w=(2,))), mod("layers2", w=(3,))))
    assert outermost(graph, {"layers", "layers.1", "layers2"}) == ["layers", "layers2"]
