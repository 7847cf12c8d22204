"""From a model to a trained model through a plan file: the fingerprint, the losses, and the projection."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import PlanMismatchError
from autoshard.pipeline import plan_model_file
from autoshard.plan import Plan
from autoshard.plan.measurement import Measurement
from autoshard.runtime import apply_plan, measure
from tests.runtime.models import Stack, TiedLM, inputs, loss_of
from tests.runtime.ranks import run_ranks, try_ranks
from tests.runtime.training import Comparison, compare, make_optimizer

pytestmark = pytest.mark.slow

MODELS = {"stack": Stack, "tied": TiedLM}


def _plan(build: type[nn.Module], **asked: object) -> Plan:
    model = build()
    request = autoshard.Request(device="cpu", devices=2, **asked)  # type: ignore[arg-type]
    return autoshard.make_plan(model, inputs=((inputs(model, 0, 0),), {}), request=request)


@pytest.fixture(scope="module", params=MODELS)
def build(request: pytest.FixtureRequest) -> type[nn.Module]:
    return MODELS[request.param]


@pytest.fixture(scope="module", params=["auto", "always"])
def plan(request: pytest.FixtureRequest, build: type[nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    autoshard.save_plan(_plan(build, reshard=request.param), path)
    return autoshard.load_plan(path)


def _run(rank: int, world: int, build: type[nn.Module], plan: Plan) -> tuple[Comparison, Measurement]:
    compared = compare(rank, world, build, plan)
    model = apply_plan(build(), plan)
    optimizer = make_optimizer(model)
    batch = inputs(model, 0, rank)
    return compared, measure(model, optimizer, lambda: loss_of(model(batch)))


def test_losses_bytes_and_collectives_are_as_planned(build: type[nn.Module], plan: Plan) -> None:
    projected = plan.projection
    for rank, (compared, measured) in enumerate(run_ranks(_run, build, plan)):
        assert compared.learned
        assert compared.loss <= 1e-5
        assert compared.keys
        assert measured.num_all_gathers == projected.num_all_gathers
        assert measured.num_reduce_scatters == projected.num_reduce_scatters
        assert measured.all_gather_bytes == projected.all_gather_bytes
        assert measured.reduce_scatter_bytes == projected.reduce_scatter_bytes
        assert measured.parameter_bytes == pytest.approx(projected.by_kind["sharded_params"], rel=0.02)
        assert measured.gradient_bytes == pytest.approx(projected.reduce_scatter_bytes / 2, rel=0.02)
        if rank == 0:
            assert measured.optimizer_bytes == pytest.approx(projected.by_kind["optimizer_state"], rel=0.02)


def _apply_changed(rank: int, world: int, plan: Plan, change: str) -> None:
    model = TiedLM()
    if change == "requires_grad":
        model.norm.weight.requires_grad_(False)
    elif change == "tie":
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    elif change == "buffer":
        model.norm.register_buffer("scale", torch.ones(1))
    elif change == "dtype":
        model.double()
    apply_plan(model, plan)


@pytest.mark.parametrize("change", ["requires_grad", "tie", "buffer", "dtype"])
def test_what_only_the_fingerprint_sees(change: str) -> None:
    for outcome in try_ranks(_apply_changed, _plan(TiedLM), change):
        assert isinstance(outcome.error, PlanMismatchError), outcome.trace
        assert "fingerprint" in [one.where for one in outcome.error.differences]


def _apply_both(rank: int, world: int, plan: Plan, told: Plan) -> None:
    apply_plan(TiedLM(), plan if rank == 0 else told)


def test_what_a_plan_says_for_people_is_not_compared() -> None:
    plan = _plan(TiedLM)
    told = msgspec.structs.replace(plan, alternatives=(), soundness="assumed")
    run_ranks(_apply_both, plan, told)


@pytest.mark.slow
def test_the_example_trains_as_its_plan_says(tmp_path: Path) -> None:
    examples = Path(__file__).parent.parent.parent / "examples"
    request = autoshard.Request(device="cpu", devices=2, memory="256MiB")
    autoshard.save_plan(plan_model_file(str(examples / "tiny_llama.py"), request).plan, tmp_path / "plan.json")
    train = [str(examples / "train.py"), "--plan", str(tmp_path / "plan.json"), "--check", "--steps", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *train],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "equal to one process" in done.stdout
