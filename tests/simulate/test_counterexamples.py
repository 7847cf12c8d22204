"""What is no law although it looks like one, and the laws with the preconditions under which they hold."""

import random
import subprocess
import sys

import pytest

from autoshard.capture import capture
from autoshard.ir import ModelGraph
from autoshard.plan import Decisions
from autoshard.request import Request, resolve
from autoshard.simulate import KINDS, Timeline, format_timeline, simulate
from tests.graphs import Par, build, chain, mod
from tests.simulate.measured import decisions
from tests.simulate.models import Chain, Mlp, floats, mean_square


def _run(graph: ModelGraph, plan: Decisions) -> Timeline:
    question = resolve(Request(device="h100-80gb", devices=plan.num_devices, precision="fp32", optimizer="sgd"))
    return simulate(graph, plan, question)


def test_splitting_a_unit_raises_the_peak_where_a_part_takes_no_gradient() -> None:
    """The part's post-backward is deferred: it stays whole, with its whole gradient, until the end of backward."""
    inner = mod("m", mod("a", weight=(101,)), mod("b", weight=(997,), takes_grad=False))
    graph = build(mod("", mod("big", weight=(2003,)), inner))
    whole = _run(graph, decisions(("big",), ("m",), shards=2))
    split = _run(graph, decisions(("big",), ("m.a",), ("m.b",), shards=2))
    # While the big unit is reduced: all shards and inputs, b whole with its whole gradient, the shard of a's gradient;
    # the big unit's gradient, still referenced, the input of its reduction, and the output.
    shards = 4 * (1002 + 51 + 499) + 32
    assert split.phase_peak_bytes("backward") == shards + 4 * (998 + 997) + 4 * 51 + 4 * (2003 + 2004 + 1002)
    assert whole.phase_peak_bytes("backward") < split.phase_peak_bytes("backward")


def test_splitting_a_unit_raises_the_peak_where_a_rest_moves_to_the_root() -> None:
    """What the unit's own module holds is then the root's, which is gathered first and freed last."""
    inner = mod("m", mod("a", weight=(101,)), mod("b", weight=(103,)), weight=(997,))
    graph = build(mod("", mod("big", weight=(2003,)), inner))
    whole = _run(graph, decisions(("big",), ("m",), shards=2))
    split = _run(graph, decisions(("big",), ("m.a",), ("m.b",), shards=2))
    assert split.peak_bytes > whole.peak_bytes
    assert split.by_kind["unsharded_params"] >= 4 * 998


def test_more_devices_raise_the_peak_where_a_dim_stops_dividing() -> None:
    """Nine rows on 3 devices are three each; on 4 they are padded to twelve, three each as well."""
    graph = build(mod("", mod("a", weight=Par(shape=(9, 7)))))
    three, four = (_run(graph, decisions(("a",), shards=count)) for count in (3, 4))
    assert three.steady_bytes == four.steady_bytes == 4 * 3 * 7
    assert four.phase_peak_bytes("forward") - three.phase_peak_bytes("forward") == 2 * 4 * 3 * 7


def _even_world(seed: int) -> tuple[ModelGraph, tuple[tuple[str, ...], ...]]:
    rng = random.Random(seed)
    sizes = [64 * rng.randint(1, 40) for _ in range(rng.randint(2, 6))]
    return build(chain(*sizes)), tuple((str(index),) for index in range(len(sizes)))


@pytest.mark.parametrize("seed", range(20))
def test_more_devices_never_raise_the_peak_where_every_dim_divides(seed: int) -> None:
    graph, units = _even_world(seed)
    peaks = [_run(graph, decisions(*units, shards=count)).peak_bytes for count in (2, 4, 8, 16, 32, 64)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_splitting_a_chain_never_raises_the_peak_where_each_part_passes_gradients_on(seed: int) -> None:
    """Units of the same modules in a chain, all of whose inputs carry gradients and without a rest for the root."""
    graph, units = _even_world(seed)
    joined = [(*units[0], *units[1]), *units[2:]]
    together, apart = _run(graph, decisions(*joined, shards=8)), _run(graph, decisions(*units, shards=8))
    assert apart.phase_peak_bytes("forward") <= together.phase_peak_bytes("forward")


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_never_lower_the_peak(seed: int) -> None:
    graph, units = _even_world(seed)
    once = _run(graph, decisions(*units, shards=8))
    every = _run(graph, decisions(*units, shards=8, micro_batches=3))
    last = _run(graph, decisions(*units, shards=8, micro_batches=3, gradient_sync="last"))
    assert once.peak_bytes <= every.peak_bytes <= last.peak_bytes
    ends = [dict(zip(KINDS, each.end.live, strict=True)) for each in (once, every, last)]
    assert ends[0] == ends[1] == ends[2]


PLAN = decisions(("layers.0",), ("layers.1",), shards=8, param="bfloat16", reduce="float32", micro_batches=2)


def projected_text() -> str:
    """A whole projection of a real model, from capture on."""
    graph = capture(
        Chain(Mlp(499), Mlp(251)), (floats(), {}), loss=mean_square, compute_dtype="bfloat16", device_kind="cpu"
    )
    return format_timeline(simulate(graph, PLAN, resolve(Request(device="cpu", devices=8, precision="bf16"))))


@pytest.mark.slow
def test_a_cold_process_projects_what_a_warm_one_does() -> None:
    warm = [projected_text(), projected_text()][1]
    code = "from tests.simulate.test_counterexamples import projected_text; print(projected_text(), end='')"
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        cold = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert cold.stdout == warm
