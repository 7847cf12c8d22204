"""Plans that compile blocks: the training is the reference's, and what is not compiled is told.

The graphs are made and partitioned by torch as always and run by its eager backend, which needs no C++ compiler;
``make bench-compile`` runs inductor.
"""

import functools

import pytest
import torch
import torch._dynamo
from torch import nn

from autoshard.analysis import analyze
from autoshard.errors import ApplyError, PlanMismatchError
from autoshard.plan import Decisions
from autoshard.planner import compiled_blocks
from autoshard.runtime import apply_plan
from autoshard.runtime.sandbox import fake_mesh
from tests.graphs import build, decoder
from tests.runtime.models import Stack
from tests.runtime.plans import decide
from tests.runtime.ranks import run_ranks
from tests.runtime.training import Comparison, compare

pytestmark = pytest.mark.slow

BLOCKS = [((f"layers.{i}",), True) for i in range(3)]
NAMES = tuple(f"layers.{i}" for i in range(3))


def _plan(**fields: object) -> Decisions:
    return decide(Stack(), [*BLOCKS, (("",), False)], compile=NAMES, **fields)  # type: ignore[arg-type]


def _train(rank: int, world: int, plans: list[Decisions]) -> list[tuple[Comparison, int]]:
    eager = functools.partialmethod(nn.Module.compile, backend="aot_eager")
    nn.Module.compile = eager  # type: ignore[method-assign,assignment]
    found = []
    for plan in plans:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compared = compare(rank, world, Stack, plan)
        found.append((compared, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return found


def test_training_equals_the_reference_also_where_blocks_recompute() -> None:
    nested = decide(Stack(), [(("layers.0.expand",), True), *BLOCKS, (("",), False)], compile=NAMES[1:])
    for found in run_ranks(_train, [_plan(), _plan(recompute=NAMES[:2]), nested], seconds=200):
        for compared, num_graphs in found:
            assert compared.learned
            assert compared.loss <= 1e-5
            assert compared.param <= 1e-4
            assert compared.keys
            assert num_graphs > 0, "nothing was compiled"


def test_a_module_that_is_not_there_is_a_difference() -> None:
    plan = decide(Stack(), [*BLOCKS, (("",), False)], compile=("layers.7",))
    with fake_mesh(plan), pytest.raises(PlanMismatchError) as caught:
        apply_plan(Stack(), plan)
    assert [(one.where, one.planned) for one in caught.value.differences] == [("layers.7", "a module (compile[0])")]


def test_what_is_not_compiled_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda module: None)
    with fake_mesh(_plan()), pytest.raises(ApplyError, match=r"layers\.0 is not compiled; layers\.1 is not compiled"):
        apply_plan(Stack(), _plan())


# torch's backend for CPUs uses its own deprecated script methods when it is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_names_and_classes_stay() -> None:
    model, plain = Stack(), Stack()
    with fake_mesh(_plan()):
        apply_plan(model, _plan())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(model.get_submodule(name)._compiled_call_impl is not None for name in NAMES)
    assert model.head._compiled_call_impl is None


def test_the_outermost_repeated_blocks_are_chosen() -> None:
    graph = build(decoder(num_layers=3))
    assert compiled_blocks(graph, analyze(graph, num_shards=2)) == NAMES
