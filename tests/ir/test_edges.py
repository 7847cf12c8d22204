"""Digraphs of names: who feeds whom, who contains whom, who shares what."""

from dataclasses import replace

from autoshard.ir import LOSS
from autoshard.ir.edges import containment, data_flow, ties
from tests.graphs import Par, build, chain, decoder, mod


def test_data_flows_along_a_chain() -> None:
    graph = build(chain(3, 5, 7))
    assert set(data_flow(graph.root).edges) == {("0", "1"), ("1", "2"), ("2", LOSS)}


def test_a_skip_connection_and_a_write_in_place() -> None:
    root = build(chain(3, 5, 7)).root
    first, second, third, loss = root.forward
    # The second op writes into the first's storage, the third reads both: it depends on the second alone for it.
    second = replace(second, outputs=(*second.outputs, *first.outputs))
    third = replace(third, inputs=(*third.inputs, *first.outputs))
    flow = data_flow(replace(root, forward=(first, second, third, loss)))
    assert set(flow.edges) == {("0", "1"), ("1", "2"), ("2", LOSS)}
    flow = data_flow(replace(root, forward=(first, root.forward[1], third, loss)))
    assert ("0", "2") in flow.edges


def test_containment_has_every_place_of_a_shared_module() -> None:
    shared = mod("s", weight=(2,))
    graph = build(mod("", mod("a", shared), mod("b", shared)))
    assert set(containment(graph).edges) == {("", "a"), ("", "b"), ("a", "a.s"), ("b", "a.s")}


def test_ties_join_the_holders() -> None:
    assert list(ties(build(decoder(1))).edges) == []
    assert list(ties(build(decoder(1, tied=True))).edges) == [("embed", "head")]
    par = Par(shape=(2,))
    graph = build(mod("", *(mod(name, w=par) for name in "abc")))
    assert {frozenset(edge) for edge in ties(graph).edges} == {frozenset("ab"), frozenset("ac"), frozenset("bc")}
