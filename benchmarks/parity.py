"""Train one model in five ways and compare: losses, live bytes per rank, speed. ``make bench-parity`` runs it.

The model is ``examples/tiny_llama.py`` (the configuration of TinyLLama-v0, random weights, fixed seed), on 2 gloo
processes on this machine's CPU, in fp32, AdamW, 20 steps:

* the reference: one process that runs each rank's inputs in turn and averages the gradients;
* FSDP1: ``FullyShardedDataParallel`` with ``transformer_auto_wrap_policy`` on the block class;
* FSDP2 by hand: ``fully_shard`` on each block, then on the root;
* FSDP2 on the root only;
* the plan that autoshard makes, applied by ``apply_plan``.

Losses: the greatest relative difference to the reference over all steps and ranks. With two ranks a difference of
exactly zero is no surprise: an average of two gradients has one order of sums and halving is exact.

Bytes: exact live bytes of rank 0 from the second step on; gloo's own threads hold a communication buffer a little
longer now and then, so a peak may differ from run to run by one buffer.

Speed: all ways stand in memory at once and run by turns, so that they share the machine's good and bad moments; only
ratios of medians are printed, since two processes on a shared CPU say nothing about seconds elsewhere.
"""

import argparse
import functools
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing
from tabulate import tabulate
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import autoshard
from autoshard.plan import Plan
from autoshard.plan.measurement import Measurement
from autoshard.runtime import Meter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import tiny_llama  # noqa: E402  (its folder has to be on the path first)

WORLD = 2
SEED = 0
COMMAND = "make bench-parity"
BEGIN, END = "<!-- parity:begin -->", "<!-- parity:end -->"


class Result(msgspec.Struct):
    """What one way came to.

    Attributes:
        way: its name.
        loss_difference: greatest relative difference to the reference; 0 for the reference itself.
        measurement: of rank 0.
        step_seconds: median time of a step.
    """

    way: str
    loss_difference: float
    measurement: Measurement
    step_seconds: float


@dataclass
class Runner:
    """One way, ready to run steps.

    Attributes:
        model: as the way made it.
        optimizer: of its parameters.
        ranks: whose inputs this process runs in one step.
        meter: measures steps while it is set.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ranks: tuple[int, ...]
    meter: Meter | None = None

    def step(self, step: int) -> list[float]:
        """One training step; a loss for each of ``ranks``."""
        if self.meter is None:
            return list(self._parts(step, lambda name: nullcontext()))
        with self.meter.step():
            return list(self._parts(step, self.meter.phase))

    def _parts(self, step: int, phase: Callable) -> Iterator[float]:
        for rank in self.ranks:
            with phase("forward"):
                loss = self.model(**inputs(step, rank))
            with phase("backward"):
                (loss / len(self.ranks)).backward()
            yield loss.item()
            del loss
        with phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()


def inputs(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Two batches for each rank by turns, so that there is something to learn."""
    return tiny_llama.example_inputs(seed=1 + 1000 * (step % 2) + rank)[1]


def fsdp1(model: nn.Module) -> nn.Module:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={tiny_llama.Block})
    # Without a device FSDP1 asks for an accelerator and refuses a machine that has none.
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def by_hand(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def make_ways(plan: Plan) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """The sharded ways by name, each from a model to a sharded model."""
    return {
        "FSDP1, transformer policy": fsdp1,
        "FSDP2 by hand, per block": by_hand,
        "FSDP2, root only": fully_shard,
        "autoshard's plan": lambda model: autoshard.apply_plan(model, plan),
    }


REFERENCE = "reference, one process"
BASE = "FSDP2 by hand, per block"
"""The way whose speed is 1."""


def make_runner(shard: Callable[[nn.Module], nn.Module] | None, rank: int) -> Runner:
    """A way from the beginning: the same initial weights each time."""
    torch.manual_seed(SEED)
    model = tiny_llama.build_model()
    if shard is not None:
        model = shard(model)
    ranks = tuple(range(WORLD)) if shard is None else (rank,)
    return Runner(model, torch.optim.AdamW(model.parameters(), lr=1e-2), ranks)


def train(runner: Runner, steps: int) -> tuple[list[list[float]], Measurement]:
    """Losses by step, and what was measured from the second step on."""
    losses = [runner.step(0)]
    meter = runner.meter = Meter(runner.model, runner.optimizer)
    losses += [runner.step(step) for step in range(1, steps)]
    runner.meter = None
    return losses, meter.measurement()


def time_by_turns(runners: dict[str, Runner], rank: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each way; the reference runs alone on rank 0 while the other rank waits."""
    seconds: dict[str, list[float]] = {way: [] for way in runners}
    for turn in range(rounds + 1):
        for way, runner in runners.items():
            dist.barrier()
            start = time.perf_counter()
            if way != REFERENCE or rank == 0:
                runner.step(turn)
            dist.barrier()
            if turn:  # the first turn warms up
                seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(times) for way, times in seconds.items()}


def run_rank(rank: int, folder: str, plan: Plan, steps: int, rounds: int) -> None:
    """Everything that one process does; rank 0 leaves the results in ``results.json``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(minutes=10)
    )
    shardings: dict[str, Callable[[nn.Module], nn.Module] | None] = {REFERENCE: None, **make_ways(plan)}
    trained = {}
    for way, shard in shardings.items():
        trained[way] = train(make_runner(shard, rank), steps)
    expected = trained[REFERENCE][0]
    gaps = {}
    for way, (losses, _) in trained.items():
        mine = [values if way == REFERENCE else [values[0]] for values in losses]
        theirs = [values if way == REFERENCE else [values[rank]] for values in expected]
        pairs = [(a, b) for found, right in zip(mine, theirs, strict=True) for a, b in zip(found, right, strict=True)]
        worst = torch.tensor(max(abs(a - b) / abs(b) for a, b in pairs), dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        gaps[way] = worst.item()
    seconds = time_by_turns({way: make_runner(shard, rank) for way, shard in shardings.items()}, rank, rounds)
    if rank == 0:
        results = [Result(way, gaps[way], trained[way][1], seconds[way]) for way in shardings]
        Path(folder, "results.json").write_bytes(msgspec.json.encode(results))
    dist.barrier()
    dist.destroy_process_group()


def table(results: list[Result]) -> str:
    """The results as a Markdown table."""
    base = next(one.step_seconds for one in results if one.way == BASE)
    rows = [
        (
            one.way,
            f"{one.loss_difference:.1e}" if one.way != REFERENCE else "—",
            *(f"{size / 2**20:.2f}" for size in held(one.measurement)),
            f"{one.measurement.peak_bytes / 2**20:.1f}",
            f"{base / one.step_seconds:.2f}",
        )
        for one in results
    ]
    headers = (
        "way",
        "greatest relative loss difference",
        "parameters, MiB",
        "gradients, MiB",
        "optimizer, MiB",
        "peak, MiB",
        "tokens/s, ratio",
    )
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 6))


def held(measurement: Measurement) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state of one rank."""
    return measurement.parameter_bytes, measurement.gradient_bytes, measurement.optimizer_bytes


def write_between_markers(page: Path, text: str) -> None:
    """Replace what stands between the markers of a page.

    Raises:
        SystemExit: the page does not exist or has no markers.
    """
    old = page.read_text() if page.exists() else ""
    new, count = re.subn(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", old, flags=re.S)
    if count != 1:
        raise SystemExit(f"{page}: needs one pair of markers {BEGIN} … {END}")
    page.write_text(new)


def main() -> None:
    """Make the plan, run both ranks, print the table."""
    parser = argparse.ArgumentParser(description="Train one model in five ways and compare.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each way")
    parser.add_argument("--memory", default="256MiB", help="what autoshard's plan may use")
    parser.add_argument("--write", type=Path, help="page whose section between the markers is replaced")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    request = autoshard.Request(device="cpu", devices=WORLD, memory=options.memory)
    plan = autoshard.make_plan(tiny_llama.build_model(), inputs=tiny_llama.example_inputs(), request=request)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder, plan, options.steps, options.rounds), nprocs=WORLD)
        results = msgspec.json.decode(Path(folder, "results.json").read_bytes(), type=list[Result])
    text = table(results)
    print(text)
    if options.write:
        about = (
            f"`{COMMAND}`: {WORLD} gloo processes, {options.steps} steps, torch {torch.__version__}, bytes of rank 0."
        )
        write_between_markers(options.write, f"{about}\n\n{text}")


if __name__ == "__main__":
    main()
