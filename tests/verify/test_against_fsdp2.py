"""The rules against FSDP2 itself: random models and plans on two ranks.

A plan that the verifier passes trains as one process does; one that it refuses fails or trains wrongly. A plan from
inside the legal space always passes.
"""

from collections import Counter
from random import Random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from autoshard.analysis import analyze
from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.ir.check import check
from autoshard.plan.schema import Decisions
from autoshard.verify import verify_plan
from tests.random_graphs import decide, random_units
from tests.runtime.ranks import note, run_ranks
from tests.torch_models import example_input, real_model, train

SHARDS = 2


def _apply(model: torch.nn.Module, plan: Decisions) -> None:
    mesh = init_device_mesh("cpu", (SHARDS,), mesh_dim_names=("shard",))
    for unit in plan.units:
        modules = [model.get_submodule(fqn) for fqn in unit.modules]
        dims = {id(model.get_parameter(key)): dim for key, dim in unit.shard_dims.items()}
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=unit.reshard,
            shard_placement_fn=lambda param, dims=dims: Shard(dims[id(param)]) if id(param) in dims else None,
        )


def _trains_right(seed: int, plan: Decisions) -> str:
    """Empty if the sharded model trains as the model of one process, else what went wrong."""
    expected, loss = real_model(Random(seed), seed)
    losses = train(expected, loss)
    model, loss = real_model(Random(seed), seed)
    try:
        _apply(model, plan)
        found = train(model, loss)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    if any(abs(one - other) > 1e-5 for one, other in zip(found, losses, strict=True)):
        return f"losses {found} instead of {losses}"
    for (key, param), other in zip(expected.named_parameters(), model.parameters(), strict=True):
        value = other.full_tensor() if isinstance(other, DTensor) else other
        tolerance = 1e-5 if param.dtype == torch.float32 else 3e-2
        if (value.float() - param.float()).abs().max() > tolerance:
            return f"{key} differs"
    return ""


def compare(rank: int, world: int, seeds: range, inside: bool) -> Counter[str]:
    """What the verifier and FSDP2 say of one random plan for each seed; any disagreement is an error."""
    counted: Counter[str] = Counter()
    for seed in seeds:
        note(f"seed {seed}")
        model, loss = real_model(Random(seed), seed)
        try:
            graph = capture(model, ((example_input(),), {}), loss=loss)
        except CaptureError:  # nothing in it trains
            counted["not trainable"] += 1
            continue
        assert check(graph) == (), f"seed {seed}"
        analysis = analyze(graph, num_shards=SHARDS)
        if any(each.severity == "error" for each in analysis.space.diagnostics):
            counted["refused"] += 1
            continue
        random = Random(seed)
        if inside:
            units = random_units(random, graph, analysis)
        else:
            units = [(each.fqn,) for each in graph.modules if each.fqn and each.has_forward and random.random() < 0.5]
        plan = decide(graph, analysis, units)
        broken = [str(each) for each in verify_plan(plan, graph, analysis) if each.severity == "error"]
        failure = _trains_right(seed, plan)
        where = f"seed {seed}, units {units}: "
        assert not broken or not inside, where + str(broken)
        assert bool(broken) == bool(failure), where + f"the verifier says {broken}, FSDP2 says {failure!r}"
        counted["illegal" if broken else "legal"] += 1
    return counted


@pytest.mark.slow
def test_plans_inside_the_legal_space_train_right() -> None:
    first, second = run_ranks(compare, range(40), True, world=SHARDS, seconds=120)
    assert first == second
    assert first["legal"] >= 20


@pytest.mark.slow
def test_the_verifier_and_fsdp2_agree_on_any_plan() -> None:
    first, second = run_ranks(compare, range(100, 160), False, world=SHARDS, seconds=120)
    assert first == second
    assert first["legal"] >= 20
    assert first["illegal"] >= 5
