"""The text of a graph is stable and says what matters."""

from collections.abc import Callable

from autoshard.ir.text import format_graph
from tests.graphs import Par, block, build, decoder, mod, stack


def test_text_of_a_tied_decoder(golden: Callable[[str, str], None]) -> None:
    golden("ir/decoder_tied.txt", format_graph(build(decoder(1, tied=True))))


def test_text_of_a_model_with_everything(golden: Callable[[str, str], None]) -> None:
    adapter = mod("adapter", weight=(3, 3), cls="Adapter")
    root = mod(
        "",
        stack("towers", mod("", adapter, cls="Tower"), mod("", adapter, cls="Tower", output_is_view=True)),
        block(4, "frozen", no_grad=True, buffers={"scale": ((4,), True), "cache": ((2, 2), False)}),
        mod("old", weight=Par(shape=(2, 2), contiguous=False), called=False),
        mod("table", weight=Par(shape=(9, 4), dtype="bfloat16", requires_grad=False), traits=("dropout",)),
        cls="Zoo",
        body=("towers.0", "towers.1", "frozen", "read old.weight", "table", "table"),
    )
    golden("ir/zoo.txt", format_graph(build(root, entry="training_step", loss_reads=("table.weight",))))
