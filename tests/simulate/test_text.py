"""The text of a timeline, as ``--dump timeline`` prints it."""

from collections.abc import Callable

from autoshard.request import Request, resolve
from autoshard.simulate import format_timeline, simulate
from tests.graphs import build, decoder
from tests.simulate.measured import decisions


def test_text(golden: Callable[[str, str], None]) -> None:
    plan = decisions(("embed",), ("layers.0",), ("layers.1",), (("norm", "head"), False), shards=8)
    question = resolve(Request(device="h100-80gb", devices=8, precision="fp32"))
    golden("simulate/decoder.timeline.txt", format_timeline(simulate(build(decoder(num_layers=2)), plan, question)))
