"""Ancestry is asked of the tree and never of the text of FQNs."""

from autoshard.ir.tree import Tree
from tests.graphs import build, chain, decoder, mod, stack


def test_post_order_has_children_first_and_the_root_last() -> None:
    tree = Tree.of(build(decoder(1)))
    assert tree.post_order[:2] == ("embed", "layers.0.norm1")
    assert tree.post_order[-1] == ""
    for fqn, parents in tree.parents.items():
        assert all(tree.post_index[parent] > tree.post_index[fqn] for parent in parents)


def test_equal_letters_are_no_ancestry() -> None:
    graph = build(mod("", mod("layers", mod("1", w=(2,))), mod("encoder", mod("layers", mod("1", w=(2,))))))
    tree = Tree.of(graph)
    assert not tree.is_inside("encoder.layers.1", "layers.1")
    assert not tree.is_inside("encoder.layers.1", "layers")
    assert tree.is_inside("encoder.layers.1", "encoder")
    assert tree.is_inside("layers", "layers")


def test_a_shared_module_has_two_parents_and_one_name() -> None:
    shared = mod("s", mod("in", w=(2,)))
    tree = Tree.of(build(mod("", stack("l", mod("", shared), mod("", shared)))))
    assert tree.parents["l.0.s"] == ("l.0", "l.1")
    assert tree.canonical("l.1.s.in") == "l.0.s.in"
    assert tree.canonical("l.2") is None
    assert tree.above("l.0.s.in") == {"l.0.s", "l.0", "l.1", "l", ""}
    assert tree.keys("l.1") == ("l.0.s.in.w",)
    assert tree.below("l.1") == {"l.1", "l.0.s", "l.0.s.in"}


def test_the_tree_of_a_graph_is_made_once() -> None:
    one, other = build(chain(2)), build(chain(2))
    assert Tree.of(one) is Tree.of(one)
    assert Tree.of(one) is not Tree.of(other)
