"""Each rule on a plan that breaks it: a legal plan of a small model, with one thing wrong."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from autoshard.analysis import analyze
from autoshard.analysis.ownership import owners, unit_digest
from autoshard.ir import ModelGraph
from autoshard.plan.schema import Axis, Decisions, Method, Precision, Unit
from autoshard.verify import verify_plan
from tests.graphs import Mod, Par, build, decoder, mod, stack

SHARDS = 4


def plan_of(graph: ModelGraph, *units: Sequence[str], reshard: bool = True, **changes: Any) -> Decisions:
    """A plan with these units in this order, right in all that follows from them; nothing is added or repaired."""
    known = [[fqn for fqn in unit if any(fqn == node.fqn for node in graph.modules)] for unit in units]
    owned = owners(graph, known, changes.get("replicated", ()))
    sizes = {param.key: param.nbytes for param in graph.params}
    made = tuple(
        Unit(
            modules=tuple(unit),
            reshard=reshard,
            num_params=len(keys),
            num_bytes=sum(sizes[key] for key in keys),
            digest=unit_digest(keys),
        )
        for unit, keys in zip(units, owned, strict=True)
    )
    mesh = (Axis(name="shard", size=SHARDS, role="shard"),)
    plan = Decisions(entry=graph.entry, mesh=mesh, precision=Precision(), units=made)
    return msgspec.structs.replace(plan, **changes)


def codes(plan: Decisions, graph: ModelGraph, severity: str = "error") -> list[tuple[str, str]]:
    """Distinct (code, place) of the findings of one severity."""
    found = verify_plan(plan, graph, analyze(graph, num_shards=SHARDS))
    return list(dict.fromkeys((each.code, each.where) for each in found if each.severity == severity))


def with_unit(plan: Decisions, index: int, **changes: Any) -> Decisions:
    units = list(plan.units)
    units[index] = msgspec.structs.replace(units[index], **changes)
    return msgspec.structs.replace(plan, units=tuple(units))


GRAPH = build(decoder(2))
LEGAL = plan_of(GRAPH, ["embed"], ["layers.0"], ["layers.1"], ["norm", "head"], [""])


def test_a_legal_plan_has_no_finding() -> None:
    assert verify_plan(LEGAL, GRAPH, analyze(GRAPH, num_shards=SHARDS)) == ()


def test_findings_say_where_and_what_to_do() -> None:
    plan = plan_of(GRAPH, ["layers"], [""])
    no_forward, reads = verify_plan(plan, GRAPH, analyze(GRAPH, num_shards=SHARDS))
    assert (reads.code, reads.message.count("15 more alike")) == ("AS203", 1)
    assert str(no_forward) == (
        "AS201 error: layers: ModuleList has no forward, which fully_shard refuses — name the modules in it instead"
    )


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (plan_of(GRAPH, ["layers.7"], [""]), [("AS230", "layers.7")]),
        (plan_of(GRAPH, [""], recompute=("x",)), [("AS230", "x")]),
        (plan_of(GRAPH, [""], methods=(Method(module="y", method="encode"),)), [("AS230", "y")]),
        (plan_of(GRAPH, [""], replicated=("z.weight",)), [("AS230", "z.weight")]),
        (plan_of(GRAPH, [""], rebuilt_buffers=("rope",)), [("AS230", "rope")]),
        (plan_of(GRAPH, [""], entry="training_step"), [("AS230", "entry")]),
        (with_unit(LEGAL, 0, shard_dims={"gone": 1}), [("AS230", "gone")]),
        (plan_of(GRAPH, ["norm"], ["norm", "head"], [""]), [("AS231", "norm")]),
        (plan_of(GRAPH, ["norm", "norm"], [""]), [("AS231", "norm")]),
        (plan_of(GRAPH, ["layers.1", "layers.0.mlp"], ["layers.0", "layers.1.mlp"], [""]), [("AS233", "layers.1.mlp")]),
        (plan_of(GRAPH, ["layers.0"], ["layers.0.mlp"], [""]), [("AS233", "layers.0.mlp")]),
        (with_unit(LEGAL, 1, num_params=7), [("AS236", "layers.0")]),
        (with_unit(LEGAL, 1, num_bytes=7), [("AS236", "layers.0")]),
        (with_unit(LEGAL, 3, digest="0" * 16), [("AS236", "norm, head")]),
        (plan_of(GRAPH, ["layers.0.mlp"], [""], recompute=("layers.0",)), [("AS237", "layers.0")]),
        (plan_of(GRAPH, [""], recompute=("layers.0", "layers.0.mlp")), [("AS237", "layers.0")]),
        (plan_of(GRAPH, ["layers.0"], [""], recompute=("layers.0",)), []),
        (plan_of(GRAPH, ["layers.0", "layers.0.mlp"], [""]), [("AS235", "layers.0.mlp")]),
        (with_unit(LEGAL, 1, shard_dims={"layers.0.mlp.up.weight": 1}), []),
        (with_unit(LEGAL, 1, shard_dims={"layers.0.mlp.up.weight": 2}), [("AS219", "layers.0.mlp.up.weight")]),
        (with_unit(LEGAL, 1, shard_dims={"layers.1.mlp.up.weight": 1}), [("AS219", "layers.1.mlp.up.weight")]),
    ],
)
def test_names_order_and_figures(plan: Decisions, expected: list[tuple[str, str]]) -> None:
    assert codes(plan, GRAPH) == expected


def test_a_shard_dim_that_the_shards_do_not_divide() -> None:
    graph = build(mod("", mod("a", w=(2, 6))))
    plan = with_unit(plan_of(graph, ["a"], [""]), 0, shard_dims={"a.w": 1})
    assert codes(plan, graph) == [("AS219", "a.w")]


@pytest.mark.parametrize(
    "mesh",
    [
        (),
        (Axis(name="a", size=2, role="replicate"),),
        (Axis(name="a", size=2, role="shard"), Axis(name="b", size=2, role="replicate")),
        (Axis(name="a", size=2, role="replicate"), Axis(name="a", size=2, role="shard")),
        (Axis(name="a", size=0, role="shard"),),
    ],
)
def test_meshes_that_are_not_known(mesh: tuple[Axis, ...]) -> None:
    assert ("AS238", "mesh") in codes(plan_of(GRAPH, [""], mesh=mesh), GRAPH)


def test_a_mesh_of_two_axes() -> None:
    mesh = (Axis(name="replicate", size=2, role="replicate"), Axis(name="shard", size=4, role="shard"))
    assert codes(plan_of(GRAPH, [""], mesh=mesh), GRAPH) == []


class TestRoot:
    def test_missing(self) -> None:
        found = codes(plan_of(GRAPH, ["layers.0"], ["layers.1"]), GRAPH)
        assert ("AS232", "(root)") in found
        assert ("AS234", "embed.weight") in found

    def test_no_units_at_all(self) -> None:
        assert ("AS232", "(root)") in codes(plan_of(GRAPH), GRAPH)

    def test_not_last(self) -> None:
        found = codes(plan_of(GRAPH, [""], ["norm"]), GRAPH)
        assert found.count(("AS232", "(root)")) == 1
        assert ("AS233", "norm") in found

    def test_in_a_list(self) -> None:
        assert ("AS232", "(root)") in codes(plan_of(GRAPH, ["norm", ""]), GRAPH)

    def test_reshards_though_the_loss_reads(self) -> None:
        graph = build(mod("", mod("a", w=(2,)), mod("head", w=(3,), called=False)), loss_reads=("head.w",))
        assert codes(plan_of(graph, ["a"], [""]), graph) == [("AS207", "head.w")]
        assert codes(plan_of(graph, ["a"], [""], reshard=False), graph) == []
        assert codes(plan_of(graph, ["head"], [""], reshard=False), graph) == [("AS203", "head.w")]

    @pytest.mark.parametrize(
        ("body", "loss_reads", "reshard", "broken"),
        [
            (("embed", "layer", "read embed.w"), (), False, False),
            (("embed", "layer", "read embed.w"), (), True, True),
            (("read embed.w", "embed", "layer"), (), False, True),
            (("layer", "read embed.w"), (), False, True),
            (("embed", "layer"), ("embed.w",), False, False),
            (("embed", "layer"), ("embed.w",), True, True),
        ],
    )
    def test_a_unit_that_stays_unsharded_may_be_read_after_it_ran(
        self, body: tuple[str, ...], loss_reads: tuple[str, ...], reshard: bool, broken: bool
    ) -> None:
        root = mod("", mod("embed", w=(9, 2)), mod("layer", w=(2,)), body=body)
        graph = build(root, loss_reads=loss_reads)
        found = codes(plan_of(graph, ["embed"], [""], reshard=reshard), graph)
        assert found == ([("AS203", "embed.w")] if broken else [])

    def test_hidden_result(self) -> None:
        graph = build(mod("", mod("a", w=(2,)), own=(3,), output_kind="opaque:Output"))
        assert codes(plan_of(graph, ["a"], [""], reshard=False), graph) == []
        assert codes(plan_of(graph, ["a"], [""]), graph) == [("AS217", "(root)")]
        assert codes(plan_of(graph, [""], reshard=False), graph) == [("AS217", "(root)")]


class TestOwners:
    def test_a_tie_across_units(self) -> None:
        graph = build(decoder(1, tied=True))
        # Whoever owns the weight, the other module reads it at another time.
        both = [("AS203", "embed.weight"), ("AS205", "embed.weight")]
        assert codes(plan_of(graph, ["embed"], [""]), graph) == both
        assert codes(plan_of(graph, ["embed"], ["head"], [""]), graph) == both
        assert codes(plan_of(graph, ["embed", "head"], [""]), graph) == []
        assert codes(plan_of(graph, [""]), graph) == []

    def test_a_shared_module_in_two_units(self) -> None:
        shared = mod("s", w=(2,))
        graph = build(mod("", mod("a", shared, w=(3,)), mod("b", shared, w=(5,))))
        assert ("AS206", "a.s.w") in codes(plan_of(graph, ["a"], ["b"], [""]), graph)
        assert codes(plan_of(graph, ["a.s"], ["a"], ["b"], [""]), graph) == []

    def test_a_shared_module_named_twice(self) -> None:
        shared = mod("s", w=(2,))
        graph = build(mod("", mod("a", shared), mod("b", shared)))
        plan = plan_of(graph, ["a.s"], [""])
        again = msgspec.structs.replace(
            plan, units=(plan.units[0], with_unit(plan, 0, modules=("b.s",)).units[0], plan.units[1])
        )
        assert ("AS231", "a.s") in codes(again, graph)


class TestReads:
    def _graph(self) -> ModelGraph:
        attn = mod("attn", mod("out", w=(2, 2), called=False), body=("peek out",))
        return build(mod("", stack("layers", mod("", attn), mod("", mod("attn", w=(2, 2))))))

    def test_a_unit_that_owns_what_its_parent_reads(self) -> None:
        graph = self._graph()
        assert codes(plan_of(graph, ["layers.0.attn.out"], [""]), graph) == [("AS203", "layers.0.attn.out.w")]
        assert codes(plan_of(graph, ["layers.0.attn"], [""]), graph) == []

    def test_a_unit_that_does_not_own_it_is_fine(self) -> None:
        # The functional head reads the embedding in the root; the unit around the embedding does not own it.
        inner = mod("inner", mod("embed", w=(9, 2)), mod("lin", w=(2,)))
        graph = build(mod("", inner, body=("inner", "read inner.embed.w")))
        assert codes(plan_of(graph, ["inner"], [""]), graph) == [("AS203", "inner.embed.w")]
        assert codes(plan_of(graph, ["inner.lin"], [""]), graph) == []

    def test_reads_before_the_root(self) -> None:
        graph = build(mod("", mod("a", w=(2,)), mod("b", w=(2,))), outside=("a",))
        assert codes(plan_of(graph, ["b"], [""]), graph) == [("AS208", "a.w")]


@pytest.mark.parametrize(
    ("par", "code"),
    [
        (Par(shape=()), "AS210"),
        (Par(shape=(0, 2)), "AS210"),
        (Par(shape=(2, 2), contiguous=False), "AS211"),
        (Par(shape=(2,), traits=("dtensor",)), "AS213"),
        (Par(shape=(2,), traits=("sparse-grad",)), "AS214"),
    ],
)
def test_parameters_that_cannot_be_sharded(par: Par, code: str) -> None:
    graph = build(mod("", mod("a", w=(2,)), p=par))
    assert codes(plan_of(graph, ["a"], [""]), graph) == [(code, "p")]


def test_a_replicated_scalar_is_nobodys() -> None:
    graph = build(mod("", mod("a", w=(2,)), p=Par(shape=())))
    assert codes(plan_of(graph, ["a"], [""], replicated=("p",)), graph) == []


def test_complex_parameters_under_mixed_precision() -> None:
    graph = build(mod("", mod("a", w=Par(shape=(2,), dtype="complex64"))))
    assert codes(plan_of(graph, [""]), graph) == []
    mixed = Precision(param="bfloat16", reduce="float32")
    assert codes(plan_of(graph, [""], precision=mixed), graph) == [("AS212", "a.w")]


def test_dtypes_of_a_unit() -> None:
    graph = build(mod("", mod("a", w=Par(shape=(2,), dtype="bfloat16")), mod("b", w=(2,)), mod("c", w=(2,))))
    assert codes(plan_of(graph, [""]), graph) == [("AS209", "(root)")]
    assert codes(plan_of(graph, ["a"], [""]), graph) == []
    assert codes(plan_of(graph, ["a", "b"], [""]), graph) == [("AS209", "a, b")]


class TestModules:
    @pytest.mark.parametrize("trait", ["script", "lazy"])
    def test_modules_that_take_no_hooks(self, trait: str) -> None:
        graph = build(mod("", mod("a", w=(2,), traits=(trait,))))
        assert codes(plan_of(graph, [""]), graph) == [("AS202", "a")]

    def test_hidden_results(self) -> None:
        graph = build(mod("", mod("a", mod("b", w=(2,)), w=(3,), output_kind="opaque:State"), mod("c", w=(2,))))
        assert codes(plan_of(graph, ["a"], [""]), graph) == [("AS217", "a")]
        assert codes(plan_of(graph, ["a.b"], [""]), graph) == []

    def test_a_unit_without_parameters_of_its_own_needs_no_hook(self) -> None:
        graph = build(mod("", mod("a", mod("b", w=(2,)), output_kind="opaque:State"), mod("c", w=(2,))))
        assert codes(plan_of(graph, ["a.b"], ["a"], [""]), graph) == []

    def test_a_partly_hidden_result(self) -> None:
        graph = build(mod("", mod("a", w=(2,)), mod("b", w=(2,))))
        spans = tuple(
            replace(span, output_kind="opaque:Cache", output_bytes=size) if span.module == "a" else span
            for span in graph.root.spans
            for size in [32]
        )
        leaking = replace(graph, regions=(replace(graph.root, spans=spans),))
        assert codes(plan_of(leaking, ["a"], [""]), leaking) == [("AS217", "a")]

    @pytest.mark.parametrize(
        ("facts", "code"), [({"early_params": ("a.w",)}, "AS225"), ({"changes_input": True}, "AS226")]
    )
    def test_what_a_run_does_to_hooks_and_inputs(self, facts: dict[str, Any], code: str) -> None:
        graph = build(mod("", mod("a", w=(2,)), mod("b", w=(2,))))
        spans = tuple(replace(span, **facts) if span.module == "a" else span for span in graph.root.spans)
        broken = replace(graph, regions=(replace(graph.root, spans=spans),))
        assert codes(plan_of(broken, ["a"], [""]), broken) == [(code, "a")]
        assert codes(plan_of(broken, ["b"], [""]), broken) == []

    def test_modules_on_demand(self) -> None:
        experts = [mod("", mod("up", w=(2,)), traits=("by-value",)) for _ in range(3)]
        graph = build(mod("", mod("moe", stack("experts", *experts)), mod("head", w=(2,))))
        plan = plan_of(graph, ["moe.experts.0.up"], ["moe.experts.2"], [""], reduce_unused=True)
        (finding,) = verify_plan(plan, graph, analyze(graph, num_shards=SHARDS))
        assert (finding.code, finding.where) == ("AS218", "moe.experts.2")
        assert finding.message.endswith("(and 1 more alike: moe.experts.*.up)")
        assert codes(plan_of(graph, ["moe"], [""], reduce_unused=True), graph) == []
        assert codes(plan_of(graph, ["moe"], [""]), graph) == [("AS239", "reduce_unused")]


class TestLists:
    def _root(self) -> Mod:
        return mod("", mod("a", w=(2,)), mod("b", w=(2,)), mod("c", w=(2,)))

    def test_neighbours(self) -> None:
        graph = build(self._root())
        assert codes(plan_of(graph, ["a", "b"], [""]), graph) == []

    def test_a_member_that_never_runs(self) -> None:
        root = self._root()
        root.children[1].called = False
        graph = build(root)
        assert codes(plan_of(graph, ["a", "b"], [""]), graph) == [("AS235", "b")]

    def test_a_member_that_runs_twice(self) -> None:
        root = self._root()
        root.body = ("a", "b", "a", "c")
        graph = build(root)
        assert codes(plan_of(graph, ["a", "b"], [""]), graph) == [("AS235", "a")]
        assert codes(plan_of(graph, ["a"], [""]), graph) == []

    def test_a_last_result_that_does_not_reach_the_loss(self) -> None:
        root = self._root()
        root.children[1].no_grad = True
        graph = build(root)
        assert codes(plan_of(graph, ["a", "b"], [""]), graph) == [("AS235", "b")]

    def test_an_order_that_is_not_that_of_execution(self) -> None:
        graph = build(self._root())
        plan = plan_of(graph, ["b", "a"], [""])
        assert codes(plan, graph) == []
        assert codes(plan, graph, "warning") == [("AS235", "b")]


class TestRecompute:
    def test_batch_statistics_and_modules_that_recompute_themselves(self) -> None:
        parts = (mod("bn", w=(2,), traits=("batch-statistics",)), mod("ck", w=(2,), traits=("checkpointed",)))
        graph = build(mod("", mod("a", parts[0]), mod("b", parts[1]), mod("c", w=(2,))))
        assert codes(plan_of(graph, [""], recompute=("a", "b", "c")), graph) == [("AS237", "a"), ("AS237", "b")]

    def test_a_module_that_never_runs(self) -> None:
        graph = build(mod("", mod("a", w=(2,)), mod("old", w=(2,), called=False)))
        plan = plan_of(graph, [""], recompute=("old",))
        assert (codes(plan, graph), codes(plan, graph, "warning")) == ([], [("AS237", "old")])

    def test_runs_that_mingle_in_backward(self) -> None:
        graph = build(mod("", mod("a", w=(2,)), mod("b", w=(2,)), body=("a", "b", "a", "b")))
        region = graph.regions[-1]
        first, second = (span for span in region.spans if span.module == "a")
        assert first.backward is not None
        assert second.backward is not None
        assert codes(plan_of(graph, [""], recompute=("a",)), graph) == []
        ends = (min(first.backward[0], second.backward[0]), max(first.backward[1], second.backward[1]))
        spans = tuple(replace(span, backward=ends) if span.module == "a" else span for span in region.spans)
        mingled = replace(graph, regions=(*graph.regions[:-1], replace(region, spans=spans)))
        assert codes(plan_of(mingled, [""], recompute=("a", "b")), mingled) == [("AS237", "a")]


def test_methods_that_have_to_be_registered() -> None:
    analysis = analyze(GRAPH, num_shards=SHARDS, methods=(("layers.0", "encode"),))
    (finding,) = verify_plan(LEGAL, GRAPH, analysis)
    assert (finding.code, finding.where) == ("AS239", "layers.0")
    registered = msgspec.structs.replace(LEGAL, methods=(Method(module="layers.0", method="encode"),))
    assert verify_plan(registered, GRAPH, analysis) == ()


def test_a_plan_from_the_tree_alone_is_judged_by_what_is_known() -> None:
    graph = replace(GRAPH, frontend="tree", regions=())
    assert verify_plan(LEGAL, graph, analyze(graph, num_shards=SHARDS)) == ()
