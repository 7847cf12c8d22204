"""Numbers of a step at another size, against sums written by hand."""

from dataclasses import replace

import pytest

from autoshard.ir import DtypeRead, ModelGraph, Moment, OpNode, Region, StorageInfo
from autoshard.ir.graph import CALLER, InputInfo
from autoshard.ir.scaling import extrapolated, first_difference
from tests.graphs import build, chain


def _graph(size: int, *, target: str = "aten.mm.default", ops: int = 1) -> ModelGraph:
    """A step whose numbers are polynomials of its size: 7, 11 s, 13 s² + 17 s + 19."""
    op = OpNode(
        target=target,
        module="0",
        inputs=(),
        outputs=(0,),
        flops=13 * size**2 + 17 * size + 19,
        bytes_read=7,
        bytes_written=11 * size,
    )
    storage = StorageInfo(nbytes=11 * size, born=Moment(phase="forward"), dies=CALLER, kind="output")
    read = DtypeRead(
        param="0.weight",
        module="",
        position=0,
        stored_bytes=29 * size,
        stored_stop=1,
        cast_bytes=31 * size**2,
        cast_stop=1,
    )
    region = Region(
        name="root", module="", forward=(op,) * ops, backward=(), storages=(storage,), spans=(), dtype_reads=(read,)
    )
    base = build(chain(3, 5))
    return replace(
        base, regions=(region,), inputs=(InputInfo(name="0", shape=(3, size, 2 * size + 1), dtype="float32"),)
    )


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 1000])
@pytest.mark.parametrize(("first", "step"), [(5, 1), (257, 256)])
def test_numbers_at_another_size(steps: int, first: int, step: int) -> None:
    samples = tuple(_graph(first + number * step) for number in range(3))
    size = first + steps * step
    found = extrapolated(samples, steps)  # type: ignore[arg-type]
    (op,), (storage,) = found.root.forward, found.root.storages
    assert (op.flops, op.bytes_read, op.bytes_written) == (13 * size**2 + 17 * size + 19, 7, 11 * size)
    assert storage.nbytes == 11 * size
    assert [(read.stored_bytes, read.cast_bytes) for read in found.root.dtype_reads] == [(29 * size, 31 * size**2)]
    assert found.inputs[0].shape == (3, size, 2 * size + 1)
    assert first_difference(found, _graph(size), numbers=True) == ""


def test_sizes_alone_are_no_difference() -> None:
    assert first_difference(_graph(5), _graph(7)) == ""
    assert first_difference(_graph(5), _graph(7), numbers=True) == "input 0 is [3, 5, 11] and [3, 7, 15]"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (_graph(5, target="aten.bmm.default"), "op 0 of forward in 0 is aten.mm.default and aten.bmm.default"),
        (_graph(5, ops=2), "forward runs 1 and 2 ops"),
        (replace(_graph(5), loss="another"), "loss"),
        (replace(_graph(5), inputs=()), "another number of tensors"),
        (replace(_graph(5), buffers=(object(),)), "0 and 1 buffers"),
    ],
)
def test_what_is_more_than_sizes(other: ModelGraph, words: str) -> None:
    assert words in first_difference(_graph(5), other)


def test_a_number_that_is_no_polynomial_is_found() -> None:
    graph = _graph(5)
    op = replace(graph.root.forward[0], flops=1)
    other = replace(graph, regions=(replace(graph.root, forward=(op,)),))
    assert first_difference(graph, other) == ""
    assert first_difference(graph, other, numbers=True) == (
        f"op 0 of forward in 0 (aten.mm.default) differs in flops ({13 * 25 + 17 * 5 + 19} and 1)"
    )
