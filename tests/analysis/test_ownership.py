"""Who owns what, and in which order units are applied."""

import hashlib
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.analysis.ownership import application_order, owners, unit_digest
from autoshard.ir.tree import Tree
from tests.graphs import Par, build, decoder, mod, stack
from tests.random_graphs import random_graph


def test_a_unit_owns_what_is_below_it_and_not_below_an_earlier_unit() -> None:
    graph = build(decoder(2))
    owned = owners(graph, [["layers.0.mlp"], ["layers.0"], [""]])
    assert owned[0] == ("layers.0.mlp.up.weight", "layers.0.mlp.down.weight")
    assert len(owned[1]) == 6
    assert {key.split(".")[0] for key in owned[2]} == {"embed", "layers", "norm", "head"}
    assert sum(map(len, owned)) == len(graph.params)


def test_a_list_unit_owns_the_sum_and_replicated_ones_belong_to_nobody() -> None:
    graph = build(decoder(1))
    assert owners(graph, [["norm", "head"], [""]], ["norm.weight"])[0] == ("head.weight",)


def test_a_shared_module_belongs_to_the_unit_applied_first() -> None:
    shared = mod("s", w=(2,))
    graph = build(mod("", mod("a", shared, w=(3,)), mod("b", shared, w=(5,))))
    assert owners(graph, [["b.s"], ["a"], ["b"], [""]]) == (("a.s.w",), ("a.w",), ("b.w",), ())
    # Without the shared module as a unit both parents claim it: not legal, and visible.
    assert owners(graph, [["a"], ["b"], [""]]) == (("a.w", "a.s.w"), ("b.w", "a.s.w"), ())


def test_a_tied_parameter_is_claimed_by_each_unit_that_holds_it() -> None:
    par = Par(shape=(2,))
    graph = build(mod("", mod("a", w=par), mod("b", w=par)))
    assert owners(graph, [["a"], [""]]) == (("a.w",), ("a.w",))
    assert owners(graph, [["a", "b"], [""]]) == (("a.w",), ())


def test_unknown_modules_raise() -> None:
    with pytest.raises(KeyError):
        owners(build(decoder(1)), [["layers.7"]])


def test_order_puts_inner_units_first_and_the_root_last() -> None:
    graph = build(decoder(2))
    groups = [("",), ("layers.1",), ("norm", "head"), ("layers.0",), ("layers.0.mlp",), ("embed",)]
    assert application_order(graph, groups) == (
        ("embed",), ("layers.0.mlp",), ("layers.0",), ("layers.1",), ("norm", "head"), ("",),
    )  # fmt: skip


def test_a_list_unit_waits_for_what_lies_in_any_of_its_members() -> None:
    graph = build(decoder(2))
    # By post-order of its first member the list would come first.
    assert application_order(graph, [("embed", "layers.1"), ("layers.1.mlp",), ("",)]) == (
        ("layers.1.mlp",), ("embed", "layers.1"), ("",),
    )  # fmt: skip


def test_units_that_contain_each_other_have_no_order() -> None:
    graph = build(decoder(2))
    with pytest.raises(ValueError, match="cannot be ordered"):
        application_order(graph, [("layers.0", "layers.1.mlp"), ("layers.0.mlp", "layers.1"), ("",)])


def test_digest_is_of_the_sorted_keys() -> None:
    assert unit_digest(["b", "a"]) == hashlib.sha256(b"a\nb").hexdigest()[:16]
    assert unit_digest([]) == hashlib.sha256(b"").hexdigest()[:16]


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_units_and_root_share_out_all_parameters(random: Random) -> None:
    graph = random_graph(random)
    tree = Tree.of(graph)
    some = [fqn for fqn in tree.nodes if fqn and random.random() < 0.4]
    order = application_order(graph, [*((fqn,) for fqn in some), ("",)])
    assert sorted(order) == sorted([*((fqn,) for fqn in some), ("",)])
    place = {unit[0]: index for index, unit in enumerate(order)}
    for fqn in some:
        assert all(place[fqn] < place[outer] for outer in tree.above(fqn) if outer in place)
    owned = owners(graph, order)
    assert {key for keys in owned for key in keys} == set(tree.params)
    for key, param in tree.params.items():
        claims = sum(key in keys for keys in owned)
        has_two_places = len(param.holders) > 1 or any(
            len(tree.parents[fqn]) > 1 for fqn in {*param.holders, *tree.above(param.holders[0])}
        )
        assert claims == 1 or has_two_places


def test_stacks_of_equal_names() -> None:
    graph = build(mod("", stack("layers", mod("", w=(2,))), mod("encoder", stack("layers", mod("", w=(3,))))))
    assert owners(graph, [["layers.0"], ["encoder.layers.0"], [""]]) == (("layers.0.w",), ("encoder.layers.0.w",), ())
