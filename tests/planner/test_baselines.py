"""The baselines are what their originals do: the size rule against torch's own, the block rule by hand."""

import functools
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from autoshard.analysis import analyze
from autoshard.capture import capture_tree
from autoshard.ir import ModelGraph
from autoshard.plan import Decisions
from autoshard.planner.baselines import _by_size, _per_block, baselines
from autoshard.request import Request, resolve
from autoshard.simulate import simulate
from tests.graphs import build, chain, decoder, mod, stack


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def _torch_size_rule(model: nn.Module, min_num_params: int) -> list[tuple[str, ...]]:
    """Units that FSDP1's own code makes, by name."""
    _recursive_wrap(
        model,
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params),
        wrapper_cls=_Wrapped,
        ignored_modules=set(),
        ignored_params=set(),
        only_wrap_children=True,
    )
    return sorted(
        (name.replace("inner.", "").removesuffix(".inner"),)
        for name, module in model.named_modules()
        if isinstance(module, _Wrapped)
    )


class _Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width)) for _ in "ab"
        )
        self.attn = nn.MultiheadAttention(width, 1)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Sequential(nn.Linear(width, 7), nn.LayerNorm(7)))


@pytest.mark.parametrize("min_num_params", [1, 50, 100, 160, 300, 500, 10_000])
def test_size_rule_equals_torch(min_num_params: int) -> None:
    model = _Tower(8)
    ours = _by_size(capture_tree(model), min_num_params)
    assert list(ours.units) == _torch_size_rule(_Tower(8), min_num_params)


def test_per_block_takes_the_class_that_holds_most_in_lists() -> None:
    graph = build(decoder(num_layers=3, hidden=8))
    assert _per_block(graph).units == (("layers.0",), ("layers.1",), ("layers.2",))


def test_per_block_without_lists_is_root_only() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    assert _per_block(capture_tree(model)).units == ()


def _baselines(graph: ModelGraph, **options: Any) -> dict[str, Decisions]:
    request = Request(device="h100-80gb", devices=4, memory="60GiB", **options)
    analysis = analyze(graph, num_shards=4)
    return {base.name: base.decisions for base in baselines(graph, analysis, resolve(request))}


def _units(decisions: Decisions) -> list[tuple[tuple[str, ...], bool]]:
    return [(unit.modules, unit.reshard) for unit in decisions.units]


BLOCKS = [((f"layers.{index}",), True) for index in range(5)]


@pytest.mark.parametrize("name", ["torchtitan's decoder rule", "accelerate's rule"])
def test_decoder_rules(name: str) -> None:
    found = _baselines(build(decoder(num_layers=5)))[name]
    ends = [(("norm", "head"), False), (("",), False)]
    assert sorted(_units(found)) == sorted([(("embed",), True), *BLOCKS, *ends])
    assert _units(found)[-1] == (("",), False)
    assert found.recompute == ()


def test_a_tied_head_joins_the_embedding() -> None:
    found = _baselines(build(decoder(num_layers=5, tied=True)))["torchtitan's decoder rule"]
    assert sorted(_units(found)) == sorted([*BLOCKS, (("embed", "norm", "head"), False), (("",), False)])


def test_every_other_block_is_every_second() -> None:
    found = _baselines(build(decoder(num_layers=5)))
    for rule in ("per block by class name", "torchtitan's decoder rule"):
        assert found[f"{rule}, every other block recomputes"].recompute == ("layers.1", "layers.3")
        assert found[f"{rule}, full recompute"].recompute == tuple(f"layers.{index}" for index in range(5))
        assert _units(found[f"{rule}, full recompute"]) == _units(found[rule])


def test_what_the_request_says_of_recompute_holds_for_baselines_too() -> None:
    graph = build(decoder(num_layers=5))
    assert all(not decisions.recompute for decisions in _baselines(graph, recompute="none").values())
    full = _baselines(graph, recompute="full")
    assert set(full["root only"].recompute) == {f"layers.{index}" for index in range(5)}
    assert "torchtitan's decoder rule" not in full


def test_policies_that_do_not_apply_are_left_out() -> None:
    named = set(_baselines(build(chain(97, 211))))
    assert named == {"root only", "per block by class name", *(name for name in named if name.startswith("size rule"))}
    assert len(named) == 5


def test_what_recomputes_holds_no_unit_in_any_baseline() -> None:
    graph = build(decoder(num_layers=3, hidden=1024))
    found = _baselines(graph, recompute="full")
    cut = found["size rule (1e+06 parameters)"]
    assert any(unit.modules[0].startswith("layers.0.") for unit in cut.units)
    assert cut.recompute == ()


def test_blocks_that_never_run_recompute_nothing() -> None:
    layers = stack("layers", *(mod(name, w=(64, 8), cls="Block", called=name < "2") for name in "012"))
    graph = build(mod("", layers))
    question = resolve(Request(device="h100-80gb", devices=4, memory="60GiB"))
    found = _baselines(graph)
    full = found["per block by class name, full recompute"]
    assert "layers.2" in full.recompute
    without = msgspec.structs.replace(full, recompute=("layers.0", "layers.1"))
    assert simulate(graph, full, question).step_ns == simulate(graph, without, question).step_ns
