"""Train a model under a plan, on CPUs (gloo) or GPUs (NCCL), and check it against one process.

    torchrun --nproc-per-node 2 examples/train.py --plan plan.json
    torchrun --nproc-per-node 2 examples/train.py --plan plan.json --check

Each rank trains on its own random tokens. With ``--check``, rank 0 also trains the same model in one process, on every
rank's tokens in turn with averaged gradients, and compares every loss; what was measured on rank 0 is set beside what
the plan projects. The exit code is 1 if something is off.
"""

import argparse
import importlib
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.plan import Plan
from autoshard.runtime import Meter

SEED = 0
LOSS_LIMIT = 1e-5
"""Greatest relative difference of a loss; a precision below fp32 changes the loss itself and has a limit of its own."""
LOW_PRECISION_LIMIT = 0.02
BYTES_LIMIT = 0.02


def main() -> int:
    """Run one rank."""
    options = read_options()
    device = start(options.device)
    plan = autoshard.load_plan(options.plan)
    source = importlib.import_module(options.model)

    torch.manual_seed(SEED)
    model = source.build_model().to(device)
    model = autoshard.apply_plan(model, plan)
    optimizer = make_optimizer(model, options.lr)  # always after apply_plan

    losses, meter = train(model, optimizer, source, options.steps, device, with_meter=options.check)
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, losses)
    is_right = True
    if dist.get_rank() == 0:
        for step, values in enumerate(zip(*everyone, strict=True)):
            print(f"step {step:3d}  mean loss {sum(values) / len(values):.6f}")
        if meter is not None:
            is_right = check(plan, source, everyone, meter, options, device)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if is_right else 1


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a model under a plan; run it with torchrun.")
    parser.add_argument("--plan", required=True, help="the plan's JSON file")
    parser.add_argument("--model", default="tiny_llama", help="module with build_model and example_inputs(seed=...)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--check", action="store_true", help="compare with one process and with the projection")
    return parser.parse_args()


def start(wanted: str) -> torch.device:
    """Join the process group; the device of this rank."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer that the plan was made for by default."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def batch_of(source: Any, step: int, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What one rank trains on in one step: two batches of its own by turns, so that there is something to learn."""
    _, tensors = source.example_inputs(seed=1 + 1000 * (step % 2) + rank)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, source: Any, steps: int, device: torch.device, with_meter: bool
) -> tuple[list[float], Meter | None]:
    """Train; the loss of each step and, if asked for, what was measured after the first step."""
    losses, meter = [], None
    for step in range(steps):
        batch = batch_of(source, step, dist.get_rank(), device)
        with meter.step() if meter else nullcontext():
            with meter.phase("forward") if meter else nullcontext():
                loss = model(**batch)
            with meter.phase("backward") if meter else nullcontext():
                loss.backward()
            with meter.phase("optimizer") if meter else nullcontext():
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
        del loss, batch
        if with_meter and meter is None:
            meter = Meter(model, optimizer)  # from the second step on: the optimizer's state exists
    return losses, meter


def train_reference(source: Any, steps: int, num_ranks: int, lr: float, device: torch.device) -> list[list[float]]:
    """The same training in one process: every rank's batch in turn, gradients averaged."""
    torch.manual_seed(SEED)
    model = source.build_model().to(device)
    optimizer = make_optimizer(model, lr)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    for step in range(steps):
        for rank in range(num_ranks):
            loss = model(**batch_of(source, step, rank, device))
            (loss / num_ranks).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check(
    plan: Plan, source: Any, found: list[list[float]], meter: Meter, options: argparse.Namespace, device: torch.device
) -> bool:
    """Print what was found beside what was expected; false if something is off."""
    expected = train_reference(source, options.steps, len(found), options.lr, device)
    pairs = [(a, b) for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True)]
    gap = max(abs(a - b) / abs(b) for a, b in pairs)
    limit = LOSS_LIMIT if plan.precision.param == "same" else LOW_PRECISION_LIMIT
    rows = [("greatest relative difference of a loss", f"{gap:.1e}", f"at most {limit:.0e}", gap <= limit)]

    measured, projected = meter.measurement(), plan.projection
    # Each reduce-scatter leaves one part of its input on each device: together these are the sharded gradients.
    gradient_bytes = projected.reduce_scatter_bytes // plan.num_shards
    for name, have, want in (
        ("bytes of parameters", measured.parameter_bytes, projected.by_kind["sharded_params"]),
        ("bytes of gradients", measured.gradient_bytes, gradient_bytes),
        ("bytes of optimizer state", measured.optimizer_bytes, projected.by_kind["optimizer_state"]),
    ):
        rows.append((name, str(have), f"{want} within 2 %", abs(have - want) <= BYTES_LIMIT * want))
    for name in ("all_gathers", "reduce_scatters", "all_reduces"):
        have, want = getattr(measured, f"num_{name}"), getattr(projected, f"num_{name}")
        rows.append((name.replace("_", "-") + " in a step", str(have), str(want), have == want))
    rows.append(("bytes at the peak", str(measured.peak_bytes), f"{projected.peak_bytes} projected", True))

    print(f"\n{'rank 0, ' + str(len(found)) + ' ranks, ' + str(options.steps) + ' steps':42}{'measured':>12}  expected")
    for name, have, want, is_fine in rows:
        print(f"{name:42}{have:>12}  {want}{'' if is_fine else '   <-- off'}")
    is_right = all(row[3] for row in rows)
    print("equal to one process" if is_right else "NOT as expected")
    return is_right


if __name__ == "__main__":
    sys.exit(main())
