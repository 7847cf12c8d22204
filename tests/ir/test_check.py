"""A sound graph has no violation; every broken invariant is named, and all of them at once."""

from dataclasses import replace
from typing import Any

import pytest

from autoshard.ir import Call, DtypeRead, ModelGraph, Moment, OpNode, Region, StorageInfo
from autoshard.ir.check import check
from tests.graphs import Par, build, chain, decoder, mod


def _shared() -> ModelGraph:
    adapter, tied = mod("adapter", weight=(3, 3)), Par(shape=(2, 2))
    return build(mod("", mod("a", adapter, w=tied), mod("b", adapter, w=tied), mod("t", p=(3,), no_grad=True)))


def _dtype_read(**changes: Any) -> ModelGraph:
    read = DtypeRead(param="0.weight", module="0", position=0, stored_bytes=4, stored_stop=1, cast_bytes=2, cast_stop=1)
    return _region(dtype_reads=(replace(read, **changes),))


@pytest.mark.parametrize("graph", [build(decoder(2)), build(decoder(2, tied=True)), build(chain(3, 5)), _shared()])
def test_hand_made_graphs_are_sound(graph: ModelGraph) -> None:
    assert check(graph) == ()


GRAPH = build(chain(3, 5))
ROOT = GRAPH.root


def _module(index: int, **changes: Any) -> ModelGraph:
    modules = list(GRAPH.modules)
    modules[index] = replace(modules[index], **changes)
    return replace(GRAPH, modules=tuple(modules))


def _param(**changes: Any) -> ModelGraph:
    return replace(GRAPH, params=(replace(GRAPH.params[0], **changes), *GRAPH.params[1:]))


def _region(**changes: Any) -> ModelGraph:
    return replace(GRAPH, regions=(replace(ROOT, **changes),))


def _span(index: int, **changes: Any) -> ModelGraph:
    spans = list(ROOT.spans)
    spans[index] = replace(spans[index], **changes)
    return _region(spans=tuple(spans))


def _op(**changes: Any) -> ModelGraph:
    return _region(forward=(replace(ROOT.forward[0], **changes), *ROOT.forward[1:]))


def _storage(index: int, **changes: Any) -> ModelGraph:
    storages = list(ROOT.storages)
    storages[index] = replace(storages[index], **changes)
    return _region(storages=tuple(storages))


def _index(kind: str) -> int:
    return next(index for index, storage in enumerate(ROOT.storages) if storage.kind == kind)


@pytest.mark.parametrize(
    ("graph", "violation"),
    [
        (_module(0, fqn="top"), "the first module is not the root"),
        (_module(1, aliases=("1",)), "module '1' is listed twice"),
        (_module(1, parent="nowhere"), "parent 'nowhere' of module '0' does not exist"),
        (_module(0, children=("0",)), "module '1' is not among the children of its parent ''"),
        (_module(0, children=("0", "1", "2")), "child '2' of module '' does not exist"),
        (_module(1, own_params=("9.weight",)), "module '0' registers '9.weight', which is no parameter key"),
        (_module(1, own_params=()), "holder '0' of parameter '0.weight' does not register it"),
        (_module(1, own_buffers=("b",)), "module '0' registers 'b', which is no buffer"),
        (_module(1, num_calls=2), "module '0' was called 2 times but has 1 spans"),
        (_module(1, traits=("b", "a")), "traits of module '0' are not sorted"),
        (_param(holders=()), "parameter '0.weight' has no holder"),
        (_param(holders=("0", "1")), "holder '1' of parameter '0.weight' does not register it"),
        (_param(nbytes=13), "parameter '0.weight' has 13 bytes for 3 elements"),
        (_param(requires_grad=False), "parameter '0.weight' gets a gradient that it does not require"),
        (_param(gets_grad=False), "parameter '0.weight' has gradient storage but gets_grad is False"),
        (_param(readers=(("", "7"),)), "reader '7' of parameter '0.weight' does not exist"),
        (_param(readers=((),)), "a reader of parameter '0.weight' is an empty stack"),
        (_op(inputs=(99,)), "region 'root': forward op 0 (aten.mm.default) names storage 99, of which there is none"),
        (_op(params=("x",)), "region 'root': forward op 0 (aten.mm.default) reads 'x', which is no parameter key"),
        (_op(module="x"), "region 'root': forward op 0 (aten.mm.default) ran in 'x', which is no module"),
        (_op(flops=-1), "region 'root': forward op 0 (aten.mm.default) has a negative cost"),
        (_op(inputs=(2,)), "region 'root': forward op 0 (aten.mm.default) uses storage 2 outside its life"),
        (
            _storage(_index("activation"), dies=Moment(phase="forward", index=1)),
            f"region 'root': storage {_index('activation')} is an activation but lives from forward to forward",
        ),
        (
            _storage(_index("gradient"), param="x"),
            f"region 'root': storage {_index('gradient')} is the gradient of 'x', which is no parameter key",
        ),
        (
            _storage(_index("activation"), dies=Moment(phase="backward", index=50)),
            f"region 'root': storage {_index('activation')} dies at backward 50, outside the region",
        ),
        (_storage(0, param="0.weight"), "region 'root': storage 0 names parameter '0.weight' but is no gradient"),
        (_span(1, module="x"), "region 'root': span of 'x': the module does not exist"),
        (_span(1, forward=(0, 9)), "region 'root': span of '0' covers forward 0:9, outside the region"),
        (_span(2, forward=(1, 3)), "region 'root': span of '1' ends after the span of '', in which it starts"),
        (replace(GRAPH, regions=()), "a traced graph has no region"),
        (_region(module="0"), "the last region describes '0', not the root"),
        (_dtype_read(param="x"), "region 'root': the dtype of 'x' asked in '0': the parameter does not exist"),
        (_dtype_read(module="x"), "region 'root': the dtype of '0.weight' asked in 'x': the module does not exist"),
        (
            _dtype_read(stored_stop=99),
            "region 'root': the dtype of '0.weight' asked in '0' covers forward 0:99, outside the region",
        ),
        (_dtype_read(cast_bytes=-1), "region 'root': the dtype of '0.weight' asked in '0' has a negative size"),
    ],
)
def test_each_broken_invariant_is_named(graph: ModelGraph, violation: str) -> None:
    assert violation in check(graph)


def test_all_violations_come_at_once() -> None:
    graph = replace(_module(1, num_calls=3), params=(replace(GRAPH.params[0], holders=()), *GRAPH.params[1:]))
    assert len(check(graph)) >= 2


def test_storage_that_dies_before_it_is_born() -> None:
    storage = StorageInfo(
        nbytes=1, born=Moment(phase="backward", index=1), dies=Moment(phase="forward", index=0), kind="temporary"
    )
    graph = _region(storages=(*ROOT.storages, storage))
    assert any("before it is born" in violation for violation in check(graph))


def test_calls_name_earlier_regions_and_positions_inside() -> None:
    inner = Region(name="block", module="0", forward=(), backward=(), storages=(), spans=())
    call = Call(region="block", module="1", forward=99, backward=None, borders=((0, 0),))
    graph = replace(GRAPH, regions=(inner, replace(ROOT, calls=(call, replace(call, region="later", forward=0)))))
    found = check(graph)
    assert "region 'root': its calls are not in forward order" in found
    assert "region 'root': call of 'block' for '1' stands at forward 99, outside the region" in found
    assert "region 'root': call of 'block' for '1' joins storages 0 and 0, which do not both exist" in found
    assert "region 'root': call of 'later' for '1': no region of that name stands before this one" in found


def test_view_that_writes() -> None:
    view = OpNode(target="aten.view.default", module="", inputs=(), outputs=(), is_view=True, bytes_written=4)
    graph = _region(forward=(*ROOT.forward, view))
    assert any("is a view and writes 4 bytes" in violation for violation in check(graph))
