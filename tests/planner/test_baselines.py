"""The baselines are what their originals do: the size rule against torch's own, the block rule by hand."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from autoshard.capture import capture_tree
from autoshard.planner.baselines import _by_size, _per_block
from tests.graphs import build, decoder


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
