"""``autoshard calibrate``: time this machine and write a device profile."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.cli.output import write_error, write_text
from autoshard.cli.progress import Progress
from autoshard.errors import RequestError
from autoshard.hardware import DeviceProfile, calibrated_profile, encode_profile, known_profiles, load_profile
from autoshard.plan.save import require_writable, write_whole
from autoshard.report import Table, format_table
from autoshard.sizes import format_bytes, format_ns

if TYPE_CHECKING:
    import torch

NAME = "calibrate"
HELP = "time this machine and write a device profile"
DESCRIPTION = """\
Time matrix products, attention, memory, kernels, collectives and units on all processes at once, fit the figures of a
device profile to them, and write it. Runs under torchrun with the devices that will train; on two CPU processes it
takes less than two minutes."""
EPILOG = """\
examples:
  torchrun --nproc-per-node 2 -m autoshard calibrate -o mine.json
  torchrun --nproc-per-node 8 -m autoshard calibrate -o node.json --like h100-80gb
  autoshard plan model.py --device mine.json --devices 2

`autoshard --help` lists the exit codes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("-o", "--output", metavar="PROFILE", required=True, help="write the profile to this .json file")
    parser.add_argument(
        "--like",
        metavar="PROFILE",
        help="take what is not measured (headroom, network of one node) from this profile; assumed: that of the device",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: to see it work, not to plan")
    parser.add_argument("--json", action="store_true", help="print the profile and nothing else")


def run(args: argparse.Namespace) -> int:
    """Time, fit, write and print."""
    if not args.output.endswith(".json"):
        raise RequestError("output", args.output, "a name that ends in .json", "profiles are known by it: mine.json")
    require_writable(args.output)
    like = None if args.like is None else load_profile(args.like)
    with _process_group() as device:
        import torch.distributed as dist

        from autoshard.runtime.calibrate import ON_CPU, ON_CUDA, QUICK, calibrate, describe_machine

        rank = dist.get_rank()
        base = like or _base(device)
        workload = QUICK if args.quick else ON_CUDA if device.type == "cuda" else ON_CPU
        progress = Progress(write_error if rank == 0 else lambda stage: None)
        with progress, contextlib.redirect_stdout(sys.stderr):
            samples = calibrate(device, workload, progress)
        machine = describe_machine(device, Path(args.output).stem)
    if rank:
        return 0
    try:
        profile = calibrated_profile(samples, base, machine)
    except ValueError as error:
        raise RequestError("calibrate", str(error), "timings that fit", "run it again on a quiet machine") from None
    write_whole(args.output, encode_profile(profile))
    load_profile(args.output)  # what was written is what plan reads
    write_text(encode_profile(profile).decode().rstrip() if args.json else _told(profile, args.output))
    return 0


@contextlib.contextmanager
def _process_group() -> "Iterator[torch.device]":
    """This rank's device, in the process group that torchrun has prepared."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise RequestError(
            "processes",
            os.environ.get("WORLD_SIZE", "1"),
            "two or more, since collectives are timed",
            "torchrun --nproc-per-node 2 -m autoshard calibrate -o mine.json",
        )
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _base(device: "torch.device") -> DeviceProfile:
    from autoshard.capture import find_accelerator

    if device.type == "cpu":
        return load_profile("cpu")
    found = find_accelerator()
    if found is None or found[0] not in known_profiles():
        raise RequestError(
            "like", found and found[0], "a device that a profile describes", "name the nearest one with --like"
        )
    return load_profile(found[0])


def _told(profile: DeviceProfile, path: str) -> str:
    calibration = profile.calibration
    assert calibration is not None
    errors = {fit.name: fit for fit in calibration.fits}
    rows = [(name, _figure(profile, name), str(fit.num_points), _percent(fit.median_error), _percent(fit.largest_error))
            for name, fit in errors.items()]  # fmt: skip
    table = Table(
        title="what was fitted, and how far from its timings it is",
        headers=("timings", "figure", "points", "median error", "largest error"),
        rows=tuple(rows),
        numeric=("points", "median error", "largest error"),
    )
    more = [
        f"hooks of a unit in one direction: {format_ns(profile.unit_host_ns)}",
        f"link within a node: {format_bytes(profile.within_node.bytes_per_second)}/s",
        f"overlap: {profile.overlap}",
    ]
    return (
        f"{profile.name}: {calibration.num_devices} x {calibration.machine}, {calibration.backend}, torch "
        f"{calibration.torch}; written to {path}\n\n{format_table(table)}\n\n" + "\n".join(more)
    )


def _figure(profile: DeviceProfile, name: str) -> str:
    kind, _, rest = name.partition(" ")
    collective, _, _ = name.partition(" over ")
    for way in profile.protocols:
        if collective in way.serves and collective != name:
            rate = int(profile.within_node.bytes_per_second * way.bandwidth)
            return f"{format_ns(way.start_ns)} + {format_ns(way.hop_ns)} a hop, {format_bytes(rate)}/s"
    if kind in ("matmul", "attention"):
        share = profile.achievable["compute" if kind == "matmul" else "attention"]
        return f"{profile.flops_per_second[rest] * share / 1e9:.4g} GFLOP/s"
    if kind == "memory":
        return f"{format_bytes(profile.memory_bytes_per_second)}/s"
    if kind == "kernel":
        return format_ns(profile.launch_ns)
    return "–"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
