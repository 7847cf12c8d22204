"""What a model keeps outside itself during a trace is put back; what cannot be is named."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autoshard.capture import capture
from autoshard.errors import CaptureError
from tests.capture import left_behind
from tests.capture.left_behind import Keeps, closed_over

pytestmark = pytest.mark.slow  # each looks at every object of the process

WAYS = [
    "global dict",
    "global list",
    "global name",
    "global object",
    "class attribute",
    "attribute of an object",
    "lru_cache",
    "cached static method",
    "a parameter",
    "an input",
]


def _num_fake() -> int:
    gc.collect()
    return sum(issubclass(type(each), FakeTensor) for each in gc.get_objects())


def _inputs() -> Any:
    return ((torch.zeros(2, 4),), {})


@pytest.mark.parametrize("how", WAYS)
def test_no_fake_tensor_stays_anywhere(how: str) -> None:
    before, model = _num_fake(), Keeps(how)
    graph = capture(model, _inputs())
    assert _num_fake() == before
    assert not [found for found in graph.diagnostics if found.code == "AS122"]
    assert left_behind.CACHE == {"before": 1}
    assert (left_behind.LIST, left_behind.LAST, left_behind.Table.shared) == ([], None, {})
    assert vars(left_behind.GLOBAL_TABLE) == vars(left_behind.Table())
    assert vars(model.table) == vars(left_behind.Table())
    assert model(torch.zeros(2, 4)).shape == (2, 4)  # a real step reads no fake tensor
    for container in (left_behind.CACHE, left_behind.LIST, left_behind.Table.shared):
        container.clear()
    left_behind.CACHE["before"] = 1
    left_behind.LAST = None
    left_behind.GLOBAL_TABLE.__init__()
    left_behind.angles.cache_clear()


def test_what_was_cached_before_stays_unless_the_cache_was_filled() -> None:
    real, number = left_behind.angles(4), left_behind.untouched(7)
    capture(Keeps("global name"), _inputs())
    assert left_behind.angles(4) is real
    assert left_behind.untouched.cache_info().currsize == 1
    capture(Keeps("lru_cache"), _inputs())
    assert not isinstance(left_behind.angles(4), FakeTensor)
    assert number == left_behind.untouched(7)
    left_behind.angles.cache_clear()


def test_a_failing_step_leaves_nothing_either() -> None:
    class Fails(Keeps):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise KeyError("on purpose")

    with pytest.raises(CaptureError, match="on purpose"):
        capture(Fails("global dict"), _inputs())
    assert left_behind.CACHE == {"before": 1}


def test_what_cannot_be_put_back_is_named() -> None:
    model = closed_over()
    found = [each for each in capture(model, _inputs()).diagnostics if each.code == "AS122"]
    assert [each.severity for each in found] == ["warning"]
    assert found[0].where == "a closure"
    assert not [each for each in capture(nn.Linear(4, 4), _inputs()).diagnostics if each.code == "AS122"]
