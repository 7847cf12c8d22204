"""The facts and the space of a model with everything, as golden texts."""

from collections.abc import Callable

from autoshard.analysis import Analysis, analyze
from autoshard.analysis.text import format_analysis, format_space
from tests.graphs import Par, block, build, decoder, mod, stack


def _zoo() -> Analysis:
    adapter, table = mod("adapter", weight=(3, 3), cls="Adapter"), Par(shape=(9, 4))
    attn = mod("attn", mod("out", weight=(4, 4), called=False), body=("peek out",), saved=128)
    root = mod(
        "",
        mod("embed", weight=table, cls="Embedding"),
        stack("towers", *(mod("", adapter, mod("lin", weight=(2, 5)), cls="Tower") for _ in range(2))),
        block(4, "frozen", no_grad=True),
        stack("layers", *(mod("", mod("norm", w=Par(shape=(4,), dtype="bfloat16")), attn, cls="L") for _ in range(1))),
        mod("state", mod("body", weight=(4, 4)), output_kind="opaque:State"),
        mod("experts", w=(2, 4, 20_000), temp=512),
        mod("old", weight=(2, 2), called=False),
        mod("head", weight=table, cls="Linear"),
        cls="Zoo",
    )
    return analyze(build(root, loss_reads=("old.weight",)), num_shards=4, methods=(("state", "encode"),))


def test_text_of_the_facts(golden: Callable[[str, str], None]) -> None:
    golden("analysis/decoder.txt", format_analysis(analyze(build(decoder(2)), num_shards=2)))
    golden("analysis/zoo.txt", format_analysis(_zoo()))


def test_text_of_the_space(golden: Callable[[str, str], None]) -> None:
    golden("space/decoder.txt", format_space(analyze(build(decoder(1, tied=True)), num_shards=2).space))
    golden("space/zoo.txt", format_space(_zoo().space))
