"""Live bytes and collectives of a step are the sums that the units imply; all sums are written out here.

``Stack`` on two ranks, in elements: enter 14*3 + 14 = 56; each block 28 + 196 + 330 + 322 = 876; norm 28; head
5*14 + 5 = 75, padded to 6*14 + 6 = 90 because two ranks hold three rows each; gain 14. 28 parameters.
"""

import pytest
import torch
from torch import nn

from autoshard.plan import Decisions, Precision
from autoshard.plan.measurement import Measurement
from autoshard.runtime import Meter, apply_plan, measure, record_collectives
from autoshard.runtime.collectives import Collective
from tests.runtime.models import Stack, inputs, loss_of
from tests.runtime.plans import decide
from tests.runtime.ranks import run_ranks
from tests.runtime.training import make_optimizer

pytestmark = pytest.mark.slow

UNITS = [
    (("enter",), True),
    *(((f"layers.{i}",), True) for i in range(3)),
    (("norm", "head"), False),
    (("",), False),
]
PADDED = 56 + 3 * 876 + 28 + 90 + 14
GATHERED = 2 * (56 + 3 * 876) + (28 + 90) + 14
"""The units that reshard are gathered twice, the last one and the root once."""


def _measure(rank: int, world: int, plan: Decisions) -> tuple[Measurement, list[Collective]]:
    model = apply_plan(Stack(), plan)
    optimizer = make_optimizer(model)
    batch = inputs(model, 0, rank)

    def compute_loss() -> torch.Tensor:
        return loss_of(model(batch))

    found = measure(model, optimizer, compute_loss)
    with record_collectives() as issued:
        compute_loss().backward()
    return found, list(issued)


@pytest.fixture(scope="module")
def fp32() -> list[tuple[Measurement, list[Collective]]]:
    return run_ranks(_measure, decide(Stack(), UNITS))


def test_bytes_of_parameters_gradients_and_optimizer(fp32: list[tuple[Measurement, list[Collective]]]) -> None:
    for rank, (found, _) in enumerate(fp32):
        own_elements = PADDED // 2 - (0 if rank == 0 else 14 + 1)  # the last row of head is padding on rank 1
        assert found.parameter_bytes == PADDED // 2 * 4
        assert found.gradient_bytes == PADDED // 2 * 4
        assert found.optimizer_bytes == 2 * own_elements * 4 + 28 * 4
        assert found.steady_bytes == found.parameter_bytes + found.optimizer_bytes
        assert (found.rank, found.num_devices, found.num_steps, found.device) == (rank, 2, 2, "cpu")


def test_peaks_stand_above_what_is_held(fp32: list[tuple[Measurement, list[Collective]]]) -> None:
    for found, _ in fp32:
        unsharded = (876 + 14 + 28 + 90) * 4
        assert list(found.peak_by_phase) == ["forward", "backward", "optimizer"]
        assert found.peak_by_phase["forward"] >= found.steady_bytes + unsharded
        assert found.peak_by_phase["backward"] >= found.steady_bytes + unsharded + 876 * 4
        assert found.peak_bytes == max(found.peak_by_phase.values()) == found.peak_by_phase[found.peak_phase]
        assert 0 <= found.other_bytes < 4 * 3 * 4 + 1000


def test_collectives_of_a_step(fp32: list[tuple[Measurement, list[Collective]]]) -> None:
    for found, issued in fp32:
        assert (found.num_all_gathers, found.num_reduce_scatters, found.num_all_reduces) == (6 + 4, 6, 0)
        assert found.all_gather_bytes == GATHERED * 4
        assert found.reduce_scatter_bytes == PADDED * 4
        assert {(one.dtype, one.group_size) for one in issued} == {("float32", 2)}
        forward = [one.num_bytes // 4 for one in issued[:6]]
        assert forward == [14, 56, 876, 876, 876, 28 + 90]


def test_two_axes_add_an_all_reduce_to_each_reduce_scatter() -> None:
    for found, issued in run_ranks(_measure, decide(Stack(), UNITS, replicas=2), world=4):
        assert (found.num_all_gathers, found.num_reduce_scatters, found.num_all_reduces) == (10, 6, 6)
        assert found.all_reduce_bytes == PADDED // 2 * 4
        assert {one.group_size for one in issued} == {2}


def test_mixed_precision_gathers_half_the_bytes_and_reduces_all() -> None:
    plan = decide(Stack(), UNITS, precision=Precision(param="bfloat16", reduce="float32"))
    for found, issued in run_ranks(_measure, plan):
        assert found.all_gather_bytes == GATHERED * 2
        assert found.reduce_scatter_bytes == PADDED * 4
        assert found.parameter_bytes == found.gradient_bytes == PADDED // 2 * 4
        assert {(one.kind, one.dtype) for one in issued} == {("all-gather", "bfloat16"), ("reduce-scatter", "float32")}


def test_a_model_that_is_not_sharded_is_measured_too() -> None:
    model = nn.Linear(11, 3, bias=False)
    found = measure(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: model(torch.ones(2, 11)).sum())
    assert (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes) == (132, 132, 0)
    assert (found.num_all_gathers, found.num_reduce_scatters, found.num_all_reduces) == (0, 0, 0)


def test_nothing_measured_is_an_error() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no step was measured"):
        Meter(model, torch.optim.SGD(model.parameters())).measurement()
