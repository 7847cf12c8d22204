"""``autoshard measure``: real training steps of a model under a plan, measured beside what is projected for them.

One process is enough: a fake process group of the plan's size allocates what one rank would, byte for byte, and moves
nothing (so losses mean nothing). Under ``torchrun`` the steps are those of the real group. The projection that is
compared is made for the device that is measured; what the plan file projects is for the device that it was made for.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from autoshard.cli.options import add_attention_option, positive
from autoshard.cli.output import write_bytes, write_error, write_text
from autoshard.cli.progress import Progress
from autoshard.cli.source import load_for_capture, load_for_training
from autoshard.errors import Difference, PlanMismatchError, RequestError
from autoshard.plan import Plan, fingerprint, load_plan
from autoshard.plan.measurement import Measurement
from autoshard.report import Table, format_table
from autoshard.request import OPTIMIZERS, Request, resolve
from autoshard.sizes import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoshard.runtime.trial import Case
    from autoshard.simulate import Timeline

NAME = "measure"
HELP = "run real steps under a plan and compare the bytes"
DESCRIPTION = """\
Apply a plan to the model that it was made for, train a few steps on this machine, and show the bytes that were alive
beside those that are projected, kind by kind.

Without torchrun one process plays rank 0 of the plan's devices: what it allocates is right, what it computes is not."""
EPILOG = """\
examples:
  autoshard measure plan.json model.py
  autoshard measure plan.json model.py --steps 5 --json
  torchrun --nproc-per-node 2 -m autoshard measure plan.json model.py

`autoshard --help` lists the exit codes."""

RESERVE = 0.1
"""Part of the machine's free memory that is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the comparison; counts and bytes are not mixed in a line.

    Attributes:
        name: what is compared.
        projected: by the simulation.
        measured: on this machine.
        is_bytes: both are bytes, not counts.
    """

    name: str
    projected: int
    measured: int
    is_bytes: bool = True

    @property
    def ratio(self) -> float | None:
        """Measured over projected; ``None`` where nothing is projected."""
        return self.measured / self.projected if self.projected else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("plan", metavar="PLAN", help="the plan file")
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="model.py, model.py:factory, package.module:factory, or a transformers config.json or its folder",
    )
    parser.add_argument("--steps", type=positive, default=2, metavar="N", help="steps to measure (default: 2)")
    parser.add_argument("--batch", type=positive, metavar="N", help="batch size of the inputs")
    parser.add_argument("--seq", type=positive, metavar="N", help="sequence length of the inputs")
    parser.add_argument("--image-size", type=positive, metavar="N", help="edge of the images in the inputs, in pixels")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that lies beside a config.json"
    )
    add_attention_option(parser)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    plan = load_plan(args.plan)
    if plan.provenance.optimizer not in OPTIMIZERS:
        raise RequestError("provenance.optimizer", plan.provenance.optimizer, "one of " + ", ".join(OPTIMIZERS))
    progress = Progress(write_error)
    with progress, contextlib.redirect_stdout(sys.stderr):
        timeline, measurement, group = measure_source(plan, args, progress)
    if measurement.rank:
        return 0
    rows = compare(timeline, measurement)
    if args.json:
        figures = {
            "group": group,
            "planned_peak_bytes": plan.projection.peak_bytes,
            "planned_device": plan.provenance.device,
            "rows": [{"name": row.name, "projected": row.projected, "measured": row.measured} for row in rows],
            "measurement": measurement,
        }
        write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    else:
        write_text(format_comparison(plan, measurement, group, rows))
    return 0


def measure_source(
    plan: Plan, args: argparse.Namespace, progress: Callable[[str], None] = lambda stage: None
) -> "tuple[Timeline, Measurement, str]":
    """Projection and measurement of the model that the arguments name, and the backend of the process group.

    Args:
        plan: made from this model.
        args: ``model``, ``steps`` (to measure, after one that is not) and the sizes of the inputs.
        progress: told the name of each stage as it begins.

    Raises:
        RequestError: the model does not fit into this machine's memory, or is on meta.
        AutoshardError: whatever loading, capturing and applying raise.
    """
    import torch

    from autoshard.capture import capture, find_accelerator
    from autoshard.simulate import simulate

    progress(f"loading {args.model}")
    subject = load_for_capture(args)
    model, pair = subject.model, subject.pairs[0]
    with _process_group(plan) as (decisions, device, backend):
        found = find_accelerator() if device == "cuda" else None
        request = Request(
            device=found[0] if found else "cpu", devices=decisions.num_devices, optimizer=plan.provenance.optimizer
        )
        require_same_model(plan, model)
        progress("capturing one training step")
        dtype = "float32" if plan.precision.param == "same" else plan.precision.param
        graph = capture(
            model,
            pair,
            loss=subject.loss,
            entry=plan.entry,
            compute_dtype=dtype,
            device_kind=device,
        )
        timeline = simulate(graph, decisions, resolve(request))
        whole = sum(param.nbytes for param in graph.params) + sum(buffer.nbytes for buffer in graph.buffers)
        if device == "cpu":
            # Sharding copies the shards while the whole model is still there; then the step has it to itself.
            require_memory(max(whole + timeline.steady_bytes, timeline.peak_bytes), free_bytes(), args.model)
        progress("training")
        # Only ops that run one by one can be followed: compiled blocks run as they are written.
        with torch.compiler.set_stance("force_eager"):
            return timeline, _train(load_for_training(args), decisions, device, args.steps), backend


def require_same_model(plan: Plan, model: "nn.Module") -> None:
    """Refuse a model that the plan was not made for.

    Raises:
        PlanMismatchError: modules that the plan names are missing, or the fingerprint is another.
    """
    from autoshard.capture import fingerprint_items

    there = {fqn for fqn, _ in model.named_modules(remove_duplicate=False)}
    missing = [
        Difference(where=fqn, planned="a module of that name", found="none")
        for fqn in sorted(plan.named_modules)
        if fqn not in there
    ]
    found = fingerprint(fingerprint_items(model), plan.named_modules)
    if found != plan.fingerprint:
        missing.append(Difference(where="fingerprint", planned=plan.fingerprint, found=found))
    if missing:
        raise PlanMismatchError(tuple(missing))


def compare(timeline: "Timeline", measurement: Measurement) -> tuple[Row, ...]:
    """What is projected beside what was measured, line by line."""
    from autoshard.simulate import KINDS

    start = dict(zip(KINDS, timeline.start.live, strict=True))
    after = [entry.state.live for entry in timeline.entries if entry.event.phase == "backward"][-1]
    left = dict(zip(KINDS, after, strict=True))
    gathered = list(timeline.collectives())

    def kinds(kind: str) -> list[int]:
        return [one.num_bytes for one in gathered if one.kind == kind]

    rows = [
        Row(name=f"peak, {phase}", projected=timeline.phase_peak_bytes(phase), measured=measured)
        for phase, measured in measurement.peak_by_phase.items()
    ]
    rows += _kind_rows(timeline, measurement)
    held = start["sharded_params"] + start["unsharded_params"]
    rows += [
        Row(name="parameters", projected=held, measured=measurement.parameter_bytes),
        Row(
            name="gradients",
            projected=left["sharded_grads"] + left["unsharded_grads"],
            measured=measurement.gradient_bytes,
        ),
        Row(name="optimizer state", projected=start["optimizer_state"], measured=measurement.optimizer_bytes),
        Row(name="inputs and buffers", projected=start["inputs"] + start["buffers"], measured=measurement.other_bytes),
    ]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        name = kind.replace("_", "-") + "s"
        count, size = getattr(measurement, f"num_{kind}s"), getattr(measurement, f"{kind}_bytes")
        rows.append(Row(name=f"{name}, number", projected=len(kinds(kind)), measured=count, is_bytes=False))
        rows.append(Row(name=f"{name}, bytes", projected=sum(kinds(kind)), measured=size))
    return tuple(row for row in rows if row.projected or row.measured)


def _kind_rows(timeline: "Timeline", measurement: Measurement) -> list[Row]:
    """What the peak of the phase with the highest one is made of, kind by kind."""
    from autoshard.simulate import KINDS

    phase = measurement.peak_phase
    measured = measurement.kinds_by_phase.get(phase, {})
    summit = max((each for each in timeline.summits if each.phase == phase), key=lambda each: each.high, default=None)
    if summit is None or not measured:
        return []
    projected = dict(zip(KINDS, summit.high_live, strict=True))
    return [
        Row(
            name=f"{phase} peak, {kind.replace('_', ' ')}",
            projected=projected.get(kind, 0),
            measured=measured.get(kind, 0),
        )
        for kind in dict.fromkeys((*KINDS, *measured))
    ]


def format_comparison(plan: Plan, measurement: Measurement, group: str, rows: tuple[Row, ...]) -> str:
    """The verdict in one line, the comparison as a table, and what to know of it."""
    peaks = [row for row in rows if row.name.startswith("peak, ")]
    projected, measured = max(row.projected for row in peaks), max(row.measured for row in peaks)
    lines = [
        f"measured on {measurement.device}, rank {measurement.rank} of {measurement.num_devices} ({group} process "
        f"group), {measurement.num_steps} steps: peak {format_bytes(measured)}, projected {format_bytes(projected)} "
        f"({100 * (measured / projected - 1):+.2f} %)",
        "",
        format_table(
            Table(
                title="bytes of one device in a step, and its collectives",
                headers=("what", "projected", "measured", "measured / projected"),
                rows=tuple(_cells(row) for row in rows),
                numeric=("projected", "measured", "measured / projected"),
            )
        ),
        "",
        f"the plan itself projects a peak of {format_bytes(plan.projection.peak_bytes)} on "
        f"{plan.provenance.device} x {plan.num_devices} for the inputs that it was made with",
    ]
    if measurement.allocator:
        figures = (
            f"{name.replace('_', ' ')} {value if name.startswith('num') else format_bytes(value)}"
            for name, value in measurement.allocator.items()
        )
        lines.append(f"the device's allocator: {', '.join(figures)}")
    if plan.compile:
        lines.append("compiled blocks ran as they are written")
    if group == "gloo":
        lines.append("gloo holds the buffers of a collective longer than a device's library does")
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    show: Callable[[int], str] = format_bytes if row.is_bytes else str
    return row.name, show(row.projected), show(row.measured), "–" if row.ratio is None else f"{row.ratio:.4f}"


def free_bytes() -> int | None:
    """Memory of this machine that a process may still take, its control group's limit included; ``None`` if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup")
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        found.append(limit - int((folder / "memory.current").read_text(encoding="ascii")))
    if not found:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found) if found else None


def require_memory(needed: int, free: int | None, model: str) -> None:
    """The steps fit into what is free.

    Raises:
        RequestError: they do not.
    """
    if free is None or needed <= free * (1 - RESERVE):
        return
    raise RequestError(
        "model",
        f"{model}, which needs {format_bytes(needed)} here",
        f"a model and a plan that fit into {format_bytes(int(free * (1 - RESERVE)))} ({format_bytes(free)} are free, "
        f"{RESERVE:.0%} of them left alone)",
        "take a smaller configuration, --batch or --seq, or measure on the devices with torchrun",
    )


@contextlib.contextmanager
def _process_group(plan: Plan) -> "Iterator[tuple[Plan, str, str]]":
    """The plan with the size of the group that is there, the device type, and the backend."""
    import torch
    import torch.distributed as dist

    from autoshard.runtime.sandbox import fake_mesh

    if "WORLD_SIZE" not in os.environ:
        with fake_mesh(plan):
            yield plan, "cpu", "fake"
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        world = dist.get_world_size()
        if len(plan.mesh) == 1:
            plan = msgspec.structs.replace(plan, mesh=(msgspec.structs.replace(plan.mesh[0], size=world),))
        yield plan, device, dist.get_backend()
    finally:
        dist.destroy_process_group()


def _train(case: "Case", plan: Plan, device: str, num_steps: int) -> Measurement:
    from torch.utils._pytree import tree_map

    from autoshard.capture.loss import find_loss
    from autoshard.runtime import Meter, accumulate, apply_plan, make_optimizer

    model = case.model
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise RequestError(
            "model", "on the meta device", "a model with its parameters", "let the factory build it on the cpu"
        )
    model = apply_plan(model.train(), plan)
    args, kwargs = tree_map(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, case.pairs[0])
    optimizer = make_optimizer(plan.provenance.optimizer, model.parameters(), lr=1e-4)
    entry = model if plan.entry == "forward" else getattr(model, plan.entry)

    def compute_loss() -> "torch.Tensor":
        return find_loss(entry(*args, **kwargs), case.loss)[0]

    compute_loss().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    meter = Meter(model, optimizer, (args, kwargs))
    for _ in range(num_steps):
        with meter.step():
            for _ in accumulate(model, plan, range(plan.micro_batches)):
                with meter.phase("forward"):
                    loss = compute_loss()
                with meter.phase("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
            with meter.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            del loss
    return meter.measurement()
