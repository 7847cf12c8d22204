"""Each rule on the smallest model that shows it: what is an atom, what is forced, and which code says why."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.analysis import LegalSpace, analyze
from autoshard.analysis.legality import params as param_rules
from autoshard.errors import Diagnostic
from autoshard.ir.tree import Tree
from tests.graphs import Mod, Par, block, build, decoder, mod, stack
from tests.random_graphs import random_graph


def space_of(root: Mod, num_shards: int = 4, **options: object) -> LegalSpace:
    return analyze(build(root, **options), num_shards=num_shards).space  # type: ignore[arg-type]


def atoms(space: LegalSpace) -> list[str]:
    return [atom.module for atom in space.atoms]


def found(space: LegalSpace, code: str) -> list[Diagnostic]:
    return [each for each in space.diagnostics if each.code == code]


def only(space: LegalSpace, code: str) -> Diagnostic:
    (one,) = found(space, code)
    return one


class TestAtoms:
    def test_a_plain_decoder(self) -> None:
        space = space_of(decoder(2))
        assert set(atoms(space)) >= {"embed", "layers.0", "layers.0.mlp", "layers.0.mlp.up", "norm", "head", ""}
        assert atoms(space)[-1] == ""
        root = space.atoms[-1]
        assert root.children == ("embed", "layers.0", "layers.1", "norm", "head")
        assert root.residual == ()
        assert len(root.params) == 19
        by_name = {atom.module: atom for atom in space.atoms}
        assert by_name["layers.0.mlp"].parent == "layers.0"
        assert by_name["layers.0"].repeat_class == by_name["layers.1"].repeat_class != ""
        assert by_name["embed"].defers_post_backward
        assert not by_name["layers.0"].defers_post_backward
        assert [by_name[name].order for name in ("", "embed", "layers.0", "layers.0.norm1")] == [0, 1, 2, 3]
        assert (space.required, space.joint, space.replicated) == ((), (), ())
        assert (space.root_must_keep, space.reduce_unused) == (False, False)

    def test_modules_without_parameters_are_no_atoms_and_no_finding(self) -> None:
        space = space_of(mod("", mod("act"), mod("a", w=(2,))))
        assert atoms(space) == ["a", ""]
        assert space.diagnostics == ()

    def test_residual_is_what_no_child_atom_owns(self) -> None:
        space = space_of(mod("", mod("a", mod("b", w=(2,)), own=(3,)), top=(5,)))
        by_name = {atom.module: atom for atom in space.atoms}
        assert by_name["a"].residual == ("a.own",)
        assert by_name[""].residual == ("top",)
        assert by_name[""].params == ("top", "a.own", "a.b.w")

    def test_a_module_called_twice_is_an_atom(self) -> None:
        space = space_of(mod("", mod("a", w=(2,)), body=("a", "a")))
        assert space.atoms[0].num_calls == 2


class TestContainers:
    def test_a_list_is_no_atom_but_its_elements_are(self) -> None:
        space = space_of(mod("", stack("layers", mod("", w=(2,)), mod("", w=(2,)))))
        assert atoms(space) == ["layers.0", "layers.1", ""]
        assert only(space, "AS201").where == "layers"

    def test_a_container_with_forward_is_an_atom(self) -> None:
        space = space_of(mod("", mod("towers", mod("0", w=(2,)), cls="ModuleList")))
        assert "towers" in atoms(space)


class TestReads:
    def test_a_child_read_by_its_parent_stays_with_the_parent(self) -> None:
        attn = mod("attn", mod("out", w=(2, 2), called=False), body=("peek out",))
        space = space_of(mod("", mod("layer", attn)))
        assert atoms(space) == ["layer.attn", "layer", ""]
        assert only(space, "AS203").where == "layer.attn.out"
        assert "layer.attn.out.w" in only(space, "AS203").message

    def test_a_read_two_levels_above(self) -> None:
        inner = mod("b", mod("c", w=(2,)))
        space = space_of(mod("", mod("a", inner, body=("b", "read a.b.c.w"))))
        assert atoms(space) == ["a", ""]

    def test_a_functional_head_keeps_the_embedding_in_the_root(self) -> None:
        embed = mod("embed", w=(9, 2))
        space = space_of(mod("", embed, mod("layer", w=(2,)), body=("embed", "layer", "read embed.w")))
        assert atoms(space) == ["layer", ""]
        assert space.atoms[-1].residual == ("embed.w",)

    def test_equal_findings_of_many_blocks_are_one(self) -> None:
        layers = [mod("", mod("out", w=(2, 2), called=False), body=("peek out",)) for _ in range(12)]
        finding = only(space_of(mod("", stack("layers", *layers))), "AS203")
        assert finding.where == "layers.0.out"
        assert finding.message.endswith("(and 11 more alike: layers.*.out)")

    def test_the_loss_reads_a_parameter(self) -> None:
        space = space_of(mod("", mod("a", w=(2,)), mod("head", w=(3,), called=False)), loss_reads=("head.w",))
        assert atoms(space) == ["a", ""]
        assert space.root_must_keep
        assert only(space, "AS207").where == "head.w"

    def test_a_module_that_runs_before_the_root(self) -> None:
        space = space_of(mod("", mod("a", w=(2,))), outside=("a",))
        assert (only(space, "AS208").where, only(space, "AS208").severity) == ("a.w", "error")


class TestNeverCalled:
    def test_the_outermost_unused_module_is_an_atom(self) -> None:
        space = space_of(mod("", mod("a", w=(2,)), mod("old", mod("in", w=(3,)), w=(3,), called=False)))
        assert atoms(space) == ["a", "old", ""]
        assert space.atoms[1].num_calls == 0
        assert space.atoms[1].order == 2
        assert (only(space, "AS204").where, only(space, "AS204").severity) == ("old", "warning")

    def test_a_module_whose_parts_run(self) -> None:
        codec = mod("codec", mod("enc", w=(2,)), spare=(3,), called=False)
        space = space_of(mod("", codec, body=("codec.enc",)))
        assert atoms(space) == ["codec.enc", ""]
        assert found(space, "AS203")
        silent = mod("codec", mod("enc", w=(2,)), mod("gone", w=(7,), called=False), called=False)
        space = space_of(mod("", silent, mod("x", w=(2,)), body=("codec.enc", "x")))
        assert "codec" not in atoms(space)

    def test_a_module_that_does_not_run_and_holds_nothing_that_is_read(self) -> None:
        quiet = mod("quiet", mod("act"), spare=(3,), called=False)
        space = space_of(mod("", quiet, mod("x", w=(2,)), body=("quiet.act", "x")))
        assert atoms(space) == ["x", ""]
        assert only(space, "AS222").where == "quiet"


class TestTies:
    def test_two_tied_modules_are_no_atoms_but_may_be_one_unit(self) -> None:
        space = space_of(decoder(1, tied=True))
        assert "embed" not in atoms(space)
        assert "head" not in atoms(space)
        assert space.joint == (("embed", "head"),)
        assert space.atoms[-1].residual == ("embed.weight",)
        assert {each.where for each in found(space, "AS205")} == {"embed", "head"}

    def test_a_tie_inside_one_module_is_free(self) -> None:
        par = Par(shape=(2,))
        space = space_of(mod("", mod("a", mod("x", w=par), mod("y", w=par))))
        assert atoms(space) == ["a", ""]
        assert space.joint == (("a.x", "a.y"),)

    @pytest.mark.parametrize("trap", ["never called", "called twice", "result unused"])
    def test_ties_that_are_no_list_unit(self, trap: str) -> None:
        par = Par(shape=(2,))
        root = mod("", mod("a", w=par), mod("b", w=par), mod("c", w=(2,)))
        if trap == "never called":
            root.children[1].called = False
        elif trap == "called twice":
            root.body = ("a", "b", "a", "c")
        else:
            root.children[1].no_grad = True
        space = space_of(root)
        assert space.joint == ()
        assert "a.w" in space.atoms[-1].residual

    def test_a_bias_tied_to_the_module_around_the_tied_head(self) -> None:
        weight, bias = Par(shape=(9, 2)), Par(shape=(9,))
        predictions = mod("predictions", mod("transform", w=(2, 2)), mod("decoder", w=weight, b=bias), b=bias)
        space = space_of(mod("", mod("embed", w=weight), mod("layer", w=(2,)), predictions))
        assert space.joint == (("embed", "predictions"),)

    def test_one_bias_of_all_layers(self) -> None:
        bias = Par(shape=(3,))
        space = space_of(mod("", stack("layers", *(mod("", mod("lin", w=(2,)), b=bias) for _ in range(3)))))
        assert space.joint == (("layers.0", "layers.1", "layers.2"),)
        assert atoms(space) == ["layers.0.lin", "layers.1.lin", "layers.2.lin", ""]


class TestShared:
    def test_a_shared_child_is_required(self) -> None:
        shared = mod("s", w=(2,))
        space = space_of(mod("", mod("a", shared, w=(3,)), mod("b", shared, w=(5,))))
        assert set(atoms(space)) == {"a.s", "a", "b", ""}
        assert space.required == ("a.s",)
        by_name = {atom.module: atom for atom in space.atoms}
        assert by_name["a.s"].parent == ""
        assert by_name["a"].params == ("a.w",)
        assert by_name["b"].params == ("b.w",)

    def test_a_shared_child_below_one_common_parent_is_free(self) -> None:
        shared = mod("s", w=(2,))
        inner = mod("top", stack("list", mod("", shared), mod("", shared)))
        space = space_of(mod("", inner))
        by_name = {atom.module: atom for atom in space.atoms}
        assert by_name["top.list.0.s"].parent == "top"
        assert set(space.required) == {"top.list.0.s"}  # for list.0 and list.1, not for top

    def test_a_shared_list_is_covered_by_its_elements(self) -> None:
        shared = stack("s", mod("", w=(2,)), mod("", w=(2,)))
        space = space_of(mod("", mod("a", shared, w=(3,)), mod("b", shared, w=(5,))))
        assert {"a", "b"} <= set(atoms(space))
        assert space.required == ("a.s.0", "a.s.1")

    def test_a_shared_child_that_is_no_atom_bars_both_parents(self) -> None:
        shared = mod("s", mod("in", w=(3,)), w=(2,), output_kind="opaque:State")
        space = space_of(mod("", mod("a", shared, w=(3,)), mod("b", shared, w=(5,))))
        assert atoms(space) == ["a.s.in", ""]
        assert only(space, "AS206").where == "a"
        assert only(space, "AS206").message.endswith("(and 1 more alike: b)")


class TestDtypes:
    def test_children_that_differ_from_the_residual_are_required(self) -> None:
        mixer = mod("mixer", mod("proj", w=Par(shape=(2,), dtype="bfloat16")), decay=(2,))
        space = space_of(mod("", mixer, mod("norm", w=(2,))))
        assert space.required == ("mixer.proj",)
        assert {"mixer", "norm"} <= set(atoms(space))

    def test_the_rarer_dtype_is_cut_where_nothing_is_fixed(self) -> None:
        layer = [mod(name, w=Par(shape=(8,), dtype="bfloat16")) for name in "ab"]
        space = space_of(mod("", *layer, mod("norm", w=(2,))))
        assert space.required == ("norm",)

    def test_one_module_with_two_dtypes(self) -> None:
        linear = mod("linear", w=Par(shape=(2,), dtype="bfloat16"), b=(2,))
        space = space_of(mod("", linear))
        assert atoms(space) == [""]
        error = only(space, "AS209") if len(found(space, "AS209")) == 1 else found(space, "AS209")[0]
        assert error.severity == "error"
        assert "linear.w (bfloat16)" in error.message
        assert "linear.b (float32)" in error.message

    def test_frozen_parameters_may_differ(self) -> None:
        codes = Par(shape=(2,), dtype="uint8", requires_grad=False)
        space = space_of(mod("", mod("linear", codes=codes, scale=(2,))))
        assert space.required == ()
        assert atoms(space) == ["linear", ""]


class TestOutputs:
    def test_a_hidden_result_bars_the_module_and_not_its_parts(self) -> None:
        layer = mod("layer", mod("body", w=(2,)), scale=(3,), output_kind="opaque:State")
        space = space_of(mod("", layer, mod("head", w=(2,))))
        assert atoms(space) == ["layer.body", "head", ""]
        assert "State" in only(space, "AS217").message
        assert only(space, "AS217").severity == "warning"

    def test_no_backward_needs_no_hook(self) -> None:
        tower = mod("tower", mod("x", w=Par(shape=(2,), requires_grad=False)), output_kind="opaque:State", no_grad=True)
        space = space_of(mod("", tower, mod("head", w=(2,))))
        assert {"tower", "tower.x"} <= set(atoms(space))

    def test_a_root_with_a_hidden_result_stays_and_needs_a_unit(self) -> None:
        space = space_of(mod("", mod("a", w=(2,)), mod("b", w=(2,)), output_kind="opaque:Output"))
        assert space.root_must_keep
        assert space.required == ("b",)
        assert only(space, "AS217").severity == "warning"

    def test_a_root_with_a_hidden_result_and_no_unit_is_refused(self) -> None:
        space = space_of(mod("", own=(2,), output_kind="opaque:Output"))
        assert only(space, "AS217").severity == "error"

    def test_a_partly_hidden_result_that_nobody_uses_is_fine(self) -> None:
        graph = build(mod("", mod("a", w=(2,)), mod("b", w=(2,))))
        spans = tuple(
            replace(span, output_kind="opaque:Cache") if span.module == "a" else span for span in graph.root.spans
        )
        cached = replace(graph, regions=(replace(graph.root, spans=spans),))
        assert "a" in atoms(analyze(cached, num_shards=2).space)
        smaller = tuple(replace(span, output_bytes=32) if span.module == "a" else span for span in spans)
        leaking = replace(graph, regions=(replace(graph.root, spans=smaller),))
        assert "a" not in atoms(analyze(leaking, num_shards=2).space)

    @pytest.mark.parametrize(
        ("facts", "code"), [({"early_params": ("a.w",)}, "AS225"), ({"changes_input": True}, "AS226")]
    )
    def test_a_module_that_stays_with_its_ancestor(self, facts: dict[str, Any], code: str) -> None:
        graph = build(mod("", mod("a", mod("x", w=(2,)), w=(3,)), mod("b", w=(2,))))
        spans = tuple(replace(span, **facts) if span.module == "a" else span for span in graph.root.spans)
        space = analyze(replace(graph, regions=(replace(graph.root, spans=spans),)), num_shards=2).space
        assert atoms(space) == ["a.x", "b", ""]
        assert (only(space, code).where, only(space, code).severity) == ("a", "note")

    def test_what_a_part_reads_early_does_not_bar_the_whole(self) -> None:
        graph = build(mod("", mod("a", mod("x", w=(2,)), w=(3,))))
        spans = tuple(
            replace(span, early_params=("a.x.w",)) if span.module == "a.x" else span for span in graph.root.spans
        )
        space = analyze(replace(graph, regions=(replace(graph.root, spans=spans),)), num_shards=2).space
        assert atoms(space) == ["a", ""]


class TestOnDemand:
    @pytest.mark.parametrize("trait", ["by-chance", "by-value"])
    def test_a_module_that_other_answers_make_run_otherwise(self, trait: str) -> None:
        layers = stack("layers", mod("", mod("up", w=(2,)), traits=(trait,)), mod("", w=(3,)))
        space = space_of(mod("", layers, mod("head", w=(2,))))
        assert atoms(space) == ["layers.1", "head", ""]
        assert space.reduce_unused
        assert (only(space, "AS218").where, only(space, "AS218").severity) == ("layers.0", "warning")

    def test_a_parameter_that_only_some_data_reads(self) -> None:
        space = space_of(mod("", mod("a", w=Par(shape=(2,), traits=("conditional",)))))
        assert atoms(space) == ["a", ""]
        assert space.reduce_unused

    def test_elements_of_a_list_that_are_to_spare_are_atoms(self) -> None:
        layers = [mod("", mod("up", w=(2,))) for _ in range(3)]
        layers[2].called = False
        space = space_of(mod("", stack("layers", *layers)))
        assert {"layers.0", "layers.1", "layers.2"} <= set(atoms(space))
        assert not space.reduce_unused

    def test_named_children_of_which_one_is_unused_are_atoms(self) -> None:
        space = space_of(mod("", mod("a", w=(2,)), mod("b", w=(2,), called=False)))
        assert atoms(space) == ["a", "b", ""]
        assert not space.reduce_unused

    def _chosen_by_data(self, side_by_side: bool) -> LegalSpace:
        moe = mod("moe", stack("experts", *(mod("", w=(2,)) for _ in range(3))))
        graph = build(mod("", mod("in", w=(2,)), moe))
        if side_by_side:
            # Every expert reads what the module before them made.
            first = graph.root.forward[0].outputs
            ops = tuple(
                replace(op, inputs=first) if op.module.startswith("moe.experts") else op for op in graph.root.forward
            )
            graph = replace(graph, regions=(replace(graph.root, forward=ops),))
        picks = Diagnostic(code="AS102", severity="warning", where="moe", message="nonzero")
        return analyze(replace(graph, diagnostics=(picks,)), num_shards=2).space

    def test_experts_side_by_side_on_picked_rows(self) -> None:
        space = self._chosen_by_data(side_by_side=True)
        assert atoms(space) == ["in", "moe", ""]
        assert space.reduce_unused

    def test_layers_in_a_chain_after_a_pick_are_free(self) -> None:
        space = self._chosen_by_data(side_by_side=False)
        assert {"moe.experts.0", "moe.experts.2"} <= set(atoms(space))
        assert not space.reduce_unused

    def test_a_module_that_only_some_inputs_run(self) -> None:
        vision = mod("vision", mod("patch", w=(2,)), traits=("conditional",))
        space = space_of(mod("", vision, mod("text", w=(2,))))
        assert atoms(space) == ["text", ""]


class TestGroups:
    def test_neighbours_of_every_depth_outermost_last(self) -> None:
        space = space_of(mod("", mod("a", mod("x", w=(2,)), mod("y", w=(2,))), mod("b", mod("z", w=(2,)))))
        assert set(space.groupable) == {("a.x", "a.y"), ("a.y", "b.z"), ("a.y", "b"), ("a", "b.z"), ("a", "b")}
        assert space.groupable[-1] == ("a", "b")

    def test_a_run_in_between_separates(self) -> None:
        space = space_of(mod("", mod("a", w=(2,)), mod("b", w=(2,)), mod("c", w=(2,))))
        assert ("a", "c") not in space.groupable
        space = space_of(mod("", mod("a", w=(2,)), mod("b", w=(2,)), scale=(2,), body=("a", "own", "b")))
        assert space.groupable == ()

    @pytest.mark.parametrize("trap", ["called twice", "no gradient", "other dtype"])
    def test_what_may_not_be_grouped(self, trap: str) -> None:
        second = Par(shape=(2,), dtype="bfloat16" if trap == "other dtype" else "float32")
        root = mod("", mod("a", w=(2,)), mod("b", w=second, no_grad=trap == "no gradient"), mod("c", w=(2,)))
        if trap == "called twice":
            root.body = ("a", "b", "c", "b")
        assert ("a", "b") not in space_of(root).groupable


class TestParameters:
    @pytest.mark.parametrize(
        ("par", "code", "severity"),
        [
            (Par(shape=()), "AS210", "note"),
            (Par(shape=(0, 3)), "AS210", "note"),
            (Par(shape=(2, 2), contiguous=False), "AS211", "error"),
            (Par(shape=(2,), traits=("dtensor",)), "AS213", "error"),
            (Par(shape=(2,), traits=("sparse-grad",)), "AS214", "error"),
            (Par(shape=(2,), traits=("shares-storage",)), "AS215", "error"),
            (Par(shape=(2,), traits=("written-in-forward",)), "AS216", "error"),
        ],
    )
    def test_what_cannot_be_sharded(self, par: Par, code: str, severity: str) -> None:
        space = space_of(mod("", mod("a", good=(2,)), p=par))
        finding = only(space, code)
        assert (finding.where, finding.severity) == ("p", severity)
        assert finding.remedy

    def test_scalars_are_replicated(self) -> None:
        space = space_of(mod("", mod("a", w=(2,)), scale=Par(shape=())))
        assert space.replicated == ("scale",)
        assert space.atoms[-1].residual == ()

    def test_complex_parameters_are_fine_unless_cast(self) -> None:
        graph = build(mod("", mod("a", w=Par(shape=(2,), dtype="complex64"))))
        assert analyze(graph, num_shards=2).space.diagnostics == ()
        cast = analyze(replace(graph, compute_dtype="bfloat16"), num_shards=2).space
        assert only(cast, "AS212").where == "a.w"

    def test_few_rows_are_sharded_along_another_dim(self) -> None:
        space = space_of(mod("", mod("experts", w=(8, 100, 640))), num_shards=64)
        assert space.shard_dims == {"experts.w": 2}
        assert only(space, "AS219").where == "experts.w"

    def test_few_rows_that_nothing_divides_are_padded(self) -> None:
        # 3 rows of 200,003 on 8 shards: 5 more rows of 800,012 bytes.
        space = space_of(mod("", mod("table", w=(3, 200_003))), num_shards=8)
        assert space.shard_dims == {}
        assert f"{5 * 200_003 * 4} bytes" in only(space, "AS220").message

    def test_small_ones_and_those_with_rows_enough_are_left_alone(self) -> None:
        space = space_of(mod("", mod("a", gate=(1, 64), w=(8, 80_000))), num_shards=8)
        assert (space.shard_dims, space.diagnostics) == ({}, ())

    def test_padding(self) -> None:
        (param,) = build(mod("", mod("a", w=(5, 7)))).params
        assert param_rules.padding_bytes(param, 4) == 3 * 7 * 4
        assert param_rules.padding_bytes(param, 5) == 0
        assert param_rules.divisible_dim(param, 7) == 1
        assert param_rules.divisible_dim(param, 5) == 0


class TestHooks:
    @pytest.mark.parametrize("trait", ["script", "lazy"])
    def test_modules_that_take_no_hooks(self, trait: str) -> None:
        space = space_of(mod("", mod("a", w=(2,), traits=(trait,))))
        assert (only(space, "AS202").where, only(space, "AS202").severity) == ("a", "error")


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_atoms_form_a_tree_that_shares_out_all_parameters(random: Random) -> None:
    graph = random_graph(random)
    space = analyze(graph, num_shards=4).space
    tree = Tree.of(graph)
    by_name = {atom.module: atom for atom in space.atoms}
    assert list(by_name) == [fqn for fqn in tree.post_order if fqn in by_name]
    residual = [key for atom in space.atoms for key in atom.residual]
    assert sorted(residual) == sorted(set(tree.params) - set(space.replicated))
    for atom in space.atoms:
        if atom.module:
            assert atom.module in by_name[atom.parent].children
            assert tree.is_inside(atom.module, atom.parent)
            assert set(atom.params) <= set(by_name[atom.parent].params)
        assert [by_name[child].order for child in atom.children] == sorted(by_name[c].order for c in atom.children)
    assert set(space.required) <= set(by_name)
    assert {fqn for pair in space.groupable for fqn in pair} <= set(by_name)
    assert not {fqn for members in space.joint for fqn in members} & set(by_name)


def test_methods_are_handed_on() -> None:
    graph = build(mod("", block(4, "codec")))
    assert analyze(graph, num_shards=2, methods=(("codec", "encode"),)).space.methods == (("codec", "encode"),)
