"""The plain analyses: order, ties, reads, repeats, liveness. Every figure is made by hand."""

from dataclasses import replace

import pytest

from autoshard.analysis import analyze
from autoshard.analysis.access import outside_reads, reader, uncovered_reads
from autoshard.analysis.liveness import module_memory
from autoshard.analysis.order import execution_order, read_positions, runs
from autoshard.analysis.repeats import repeated_blocks
from autoshard.analysis.space import ModuleMemory
from autoshard.analysis.ties import tied_parameters
from autoshard.ir import CALLER, LOSS, Call, ModelGraph, Region, StorageInfo
from tests.graphs import Par, block, build, chain, decoder, mod, stack


def test_order_is_that_of_the_first_run() -> None:
    graph = build(mod("", mod("a", w=(2,)), mod("b", w=(2,)), body=("b", "a", "b")))
    assert execution_order(graph) == ("", "b", "a")
    assert [run.module for run in runs(graph)] == ["", "b", "a", "b"]


def test_modules_that_never_run_are_not_in_the_order() -> None:
    graph = build(mod("", mod("a", w=(2,)), mod("old", w=(2,), called=False)))
    assert execution_order(graph) == ("", "a")


def test_without_regions_the_tree_gives_the_order() -> None:
    graph = replace(build(decoder(1)), frontend="tree", regions=())
    assert execution_order(graph)[:3] == ("", "embed", "layers.0")
    assert runs(graph) == ()
    assert read_positions(graph) == ()
    assert analyze(graph, num_shards=2).memory == ()


def test_ties_are_between_modules() -> None:
    assert tied_parameters(build(decoder(1, tied=True))) == (("embed.weight", ("embed", "head")),)
    twice = Par(shape=(2,))
    assert tied_parameters(build(mod("", mod("a", w=twice, again=twice)))) == ()


def test_outside_reads_have_no_holder_on_the_stack() -> None:
    inner = mod("attn", mod("out", w=(2, 2), called=False), body=("peek out",))
    graph = build(mod("", mod("layer", inner), mod("embed", w=(2, 2)), body=("embed", "layer", "read embed.w")))
    assert outside_reads(graph) == (("layer.attn.out.w", ("", "layer", "layer.attn")), ("embed.w", ("",)))
    (param,) = (param for param in graph.params if param.key == "embed.w")
    assert uncovered_reads(param, ("embed",)) == (("",),)
    assert uncovered_reads(param, ("",)) == ()
    assert [reader(stack) for stack in (("", "a"), ("",), (LOSS,), ())] == ["a", "(root)", LOSS, LOSS]


def test_blocks_are_found_by_structure_outermost_first() -> None:
    blocks = repeated_blocks(build(decoder(3)))
    assert blocks[0].modules == ("layers.0", "layers.1", "layers.2")
    assert ("layers.1.attn.q", "layers.1.attn.k", "layers.1.attn.v", "layers.1.attn.o") in [b.modules for b in blocks]


def test_blocks_of_two_kinds_in_turn() -> None:
    layers = [block(8), block(8, ffn=4), block(8), block(8, ffn=4)]
    found = [each.modules for each in repeated_blocks(build(mod("", stack("layers", *layers))))]
    assert found[:2] == [("layers.0", "layers.2"), ("layers.1", "layers.3")]


def test_lists_in_lists_are_looked_through() -> None:
    rows = [stack("", mod("", w=(3,), cls="Norm"), mod("", w=(5, 5), cls="Attention")) for _ in range(3)]
    found = {each.modules for each in repeated_blocks(build(mod("", stack("layers", *rows))))}
    assert found == {("layers.0.0", "layers.1.0", "layers.2.0"), ("layers.0.1", "layers.1.1", "layers.2.1")}


def test_two_lists_of_one_parent_are_two_runs() -> None:
    graph = build(mod("", *(stack(name, mod("", w=(3,)), mod("", w=(3,))) for name in ("up", "down"))))
    assert {each.modules for each in repeated_blocks(graph)} == {("up.0", "up.1"), ("down.0", "down.1")}


def test_modules_without_parameters_or_runs_are_no_blocks() -> None:
    graph = build(
        mod("", stack("acts", mod(""), mod("")), stack("old", mod("", w=(2,)), mod("", w=(2,), called=False)))
    )
    assert repeated_blocks(graph) == ()


def test_memory_by_hand() -> None:
    # a makes 64 and keeps 100 more; b makes 64 with 300 of scratch; c makes 64. The input of each is kept.
    parts = [mod("a", w=(2,), saved=100), mod("b", w=(3,), temp=300), mod("c", w=(5,))]
    memory = {each.module: each for each in module_memory(build(mod("", mod("ab", *parts[:2]), parts[2])))}
    assert memory["ab.a"] == ModuleMemory(module="ab.a", saved_bytes=164, peak_bytes=164)
    assert memory["ab.b"] == ModuleMemory(module="ab.b", saved_bytes=64, peak_bytes=364)
    assert memory["ab"] == ModuleMemory(module="ab", saved_bytes=228, peak_bytes=164 + 364)
    assert memory[""] == ModuleMemory(module="", saved_bytes=292, peak_bytes=164 + 364)


def test_memory_of_what_is_not_trained_is_not_kept() -> None:
    graph = build(mod("", mod("tower", mod("x", w=(2,)), mod("y", w=(2,)), no_grad=True), mod("head", w=(2,))))
    memory = {each.module: each for each in module_memory(graph)}
    # The head keeps the tower's result; the tower's own intermediate dies inside it.
    assert memory["tower"] == ModuleMemory(module="tower", saved_bytes=64, peak_bytes=128)
    assert memory["tower.x"] == ModuleMemory(module="tower.x", saved_bytes=0, peak_bytes=64)


def test_memory_of_several_runs_adds_up() -> None:
    graph = build(mod("", mod("a", w=(2,)), body=("a", "a", "a")))
    (root, a) = module_memory(graph)
    assert a == ModuleMemory(module="a", saved_bytes=192, peak_bytes=64)
    assert root.saved_bytes == 192


def _outlined(num_layers: int) -> ModelGraph:
    """A decoder whose layers were captured once, and called: layers.0 stands for all."""
    graph = build(decoder(num_layers))
    region, first = graph.root, 1
    (span,) = (span for span in region.spans if span.module == "layers.0")
    size = span.forward[1] - span.forward[0]
    inner_spans = tuple(
        replace(each, forward=(each.forward[0] - first, each.forward[1] - first), backward=(0, 1))
        for each in region.spans
        if each.module == "layers.0" or each.module.startswith("layers.0.")
    )
    at = [replace(storage.born, index=storage.born.index - first) for storage in region.storages]
    inner = Region(
        name="block",
        module="layers.0",
        forward=tuple(replace(op, inputs=(), outputs=()) for op in region.forward[first : first + size]),
        backward=(),
        storages=tuple(
            StorageInfo(nbytes=64, born=at[index + 2], dies=replace(at[0], phase="backward"), kind="activation")
            for index in range(size)
        ),
        spans=inner_spans,
    )
    last = first + num_layers * size
    outer_spans = tuple(
        replace(each, forward=(each.forward[0] and each.forward[0] - last + first, each.forward[1] - last + first))
        for each in region.spans
        if not each.module.startswith("layers.") and each.module not in ("", "embed")
    )
    root = replace(
        region,
        forward=(region.forward[0], *region.forward[last:]),
        storages=(region.storages[0],),
        spans=(
            replace(region.spans[0], forward=(0, len(region.forward) - last)),
            next(each for each in region.spans if each.module == "embed"),
            *outer_spans,
        ),
        calls=tuple(Call(region="block", module=f"layers.{i}", forward=1, backward=1) for i in range(num_layers)),
    )
    return replace(graph, regions=(inner, root))


def test_outlined_blocks_have_the_order_of_the_whole() -> None:
    whole, outlined = build(decoder(3)), _outlined(3)
    assert execution_order(outlined) == execution_order(whole)
    assert [(run.module, run.start, run.end) for run in runs(outlined)] == [
        (run.module, run.start, run.end) for run in runs(whole)
    ]
    assert read_positions(outlined) == read_positions(whole)


def test_outlined_blocks_have_the_same_groups() -> None:
    whole, outlined = (analyze(graph, num_shards=2).space for graph in (build(decoder(3)), _outlined(3)))
    assert outlined.groupable == whole.groupable
    assert [atom.module for atom in outlined.atoms] == [atom.module for atom in whole.atoms]


def test_memory_of_outlined_blocks_counts_at_each_call() -> None:
    memory = {each.module: each for each in module_memory(_outlined(3))}
    for layer in ("layers.0", "layers.1", "layers.2"):
        assert memory[layer] == ModuleMemory(module=layer, saved_bytes=512, peak_bytes=512)
    assert memory[""].saved_bytes == 3 * 512


@pytest.mark.parametrize("kind", ["input", "buffer"])
def test_memory_that_came_from_elsewhere_is_not_counted(kind: str) -> None:
    graph = build(chain(2))
    storage = StorageInfo(nbytes=1 << 20, born=CALLER, dies=CALLER, kind=kind)  # type: ignore[arg-type]
    more = replace(graph, regions=(replace(graph.root, storages=(*graph.root.storages, storage)),))
    assert module_memory(more) == module_memory(graph)
