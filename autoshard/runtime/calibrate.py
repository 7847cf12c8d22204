"""Time this machine: matrix products, attention, memory, kernels, collectives, and steps of models of many small units.

Every rank of the process group takes part at the same time, so that what they share (cores, memory, links) is shared
as in training. A timing is the lower quartile of several repeats, averaged over the ranks: what else the machine does
only ever adds to it. On CUDA events time the device; on cpu, where the host computes, its clock does. Nothing is fitted
here: ``hardware.calibrated_profile`` does that.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.errors import RequestError
from autoshard.hardware import Machine, Sample

NS_PER_SECOND = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is timed.

    Attributes:
        products: edges of square matrices.
        sequences: lengths of attention's sequences.
        copies: bytes of one operand.
        kernels: links of a chain of tiny ops.
        messages: bytes of a collective's large buffer.
        units: numbers of units of the models.
        repeats: of each timing.
    """

    products: tuple[int, ...]
    sequences: tuple[int, ...]
    copies: tuple[int, ...]
    kernels: tuple[int, ...]
    messages: tuple[int, ...]
    units: tuple[int, ...]
    repeats: int


KIB, MIB = 2**10, 2**20
ON_CPU = Workload(
    products=(64, 128, 256, 512, 768),
    sequences=(64, 128, 256, 512),
    copies=(64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    kernels=(50, 100),
    messages=(4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    units=(2, 8, 20),
    repeats=15,
)
ON_CUDA = Workload(
    products=(1024, 2048, 4096, 8192),
    sequences=(512, 1024, 2048, 4096),
    copies=(4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    kernels=(200, 400),
    messages=(64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB),
    units=(4, 16, 32),
    repeats=15,
)
QUICK = Workload(
    products=(32, 256),
    sequences=(16, 128),
    copies=(64 * KIB, 4 * MIB),
    kernels=(10, 20),
    messages=(4 * KIB, MIB, 8 * MIB),
    units=(1, 3),
    repeats=3,
)


def calibrate(
    device: torch.device, workload: Workload, progress: Callable[[str], None] = lambda stage: None
) -> tuple[Sample, ...]:
    """The timings, the same on all ranks of the default process group.

    Args:
        device: of this rank.
        workload: what is timed.
        progress: told the name of each stage as it begins.

    Raises:
        RequestError: there is no process group of two ranks or more.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise RequestError(
            "process group",
            dist.get_world_size() if dist.is_initialized() else None,
            "two processes or more",
            "torchrun --nproc-per-node 2 -m autoshard calibrate -o profile.json",
        )
    timer = _Timer(device, workload.repeats)
    found: list[Sample] = []
    for stage, part in (
        ("timing matrix products", _products),
        ("timing attention", _attention),
        ("timing memory", _memory),
        ("timing small kernels", _kernels),
        ("timing collectives", _collectives),
        ("timing units", _units),
    ):
        progress(stage)
        found += part(timer, workload)
    return tuple(found)


def describe_machine(device: torch.device, name: str) -> Machine:
    """On what this process group runs; the same on all ranks."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described, memory = properties.name, properties.total_memory
    else:
        described = f"one process on {_cpu_name()}, {os.cpu_count()} cores"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
    return Machine(
        name=name,
        description=described,
        memory_bytes=memory,
        torch=torch.__version__.partition("+")[0],
        backend=dist.get_backend(),
        num_devices=dist.get_world_size(),
        devices_per_node=per_node,
        num_threads=torch.get_num_threads(),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


_Name = TypeVar("_Name")


class _Timer:
    """Lower quartiles of repeats, all ranks starting together."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def __call__(self, run: Callable[[], object], group: dist.ProcessGroup | None = None) -> int:
        """Nanoseconds of a call, the mean over the group's ranks."""
        run()
        return self.by_turns({(): run}, group)[()]

    def by_turns(
        self, runs: dict[_Name, Callable[[], object]], group: dist.ProcessGroup | None = None
    ) -> dict[_Name, int]:
        """Nanoseconds of each of several calls that take turns."""
        once = self._on_device if self.device.type == "cuda" else self._on_host
        times: dict[_Name, list[int]] = {name: [] for name in runs}
        for _ in range(self.repeats):
            for name, run in runs.items():
                dist.barrier(group)
                times[name].append(once(run))
        quartiles = [float(statistics.quantiles(of, n=4)[0]) for of in times.values()]
        mine = torch.tensor(quartiles, dtype=torch.float64, device=self.device)
        dist.all_reduce(mine, group=group)
        means = (mine / dist.get_world_size(group)).tolist()
        return {name: max(1, round(mean)) for name, mean in zip(runs, means, strict=True)}

    def _on_host(self, run: Callable[[], object]) -> int:
        start = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - start

    def _on_device(self, run: Callable[[], object]) -> int:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        first.record()
        run()
        last.record()
        torch.cuda.synchronize(self.device)
        return int(first.elapsed_time(last) * 10**6)


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32, torch.bfloat16)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _products(timer: _Timer, workload: Workload) -> Iterator[Sample]:
    for dtype in _dtypes(timer.device):
        for edge in workload.products:
            left, right = (torch.ones(edge, edge, dtype=dtype, device=timer.device) for _ in range(2))
            ns = timer(lambda left=left, right=right: left @ right)  # type: ignore[misc]
            yield Sample(figure=f"matmul {_name(dtype)}", work=2 * edge**3, ns=ns)


def _attention(timer: _Timer, workload: Workload) -> Iterator[Sample]:
    """Forward and backward of torch's fused attention, causal; operations as torch counts them, the mask left out."""
    dtype = torch.bfloat16 if timer.device.type == "cuda" else torch.float32
    batch, heads, dim = 2, 4, 64
    for length in workload.sequences:
        query, key, value = (
            torch.ones(batch, heads, length, dim, dtype=dtype, device=timer.device, requires_grad=True)
            for _ in range(3)
        )

        def run(query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value) -> None:
            F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

        flops = 4 * batch * heads * length * length * dim
        yield Sample(figure=f"attention {_name(dtype)}", work=flops * 7 // 2, ns=timer(run))


def _memory(timer: _Timer, workload: Workload) -> Iterator[Sample]:
    for num_bytes in workload.copies:
        left, right, out = (torch.ones(num_bytes // 4, device=timer.device) for _ in range(3))
        ns = timer(lambda left=left, right=right, out=out: torch.add(left, right, out=out))  # type: ignore[misc]
        yield Sample(figure="memory", work=3 * num_bytes, ns=ns)


class _Kernels(TorchDispatchMode):
    """Counts the ops that move data."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


def _kernels(timer: _Timer, workload: Workload) -> Iterator[Sample]:
    """A chain of tiny ops, forward and backward: what the host needs for one, since no device is ever behind."""
    for links in workload.kernels:
        factors = [torch.ones(16, device=timer.device, requires_grad=True) for _ in range(links)]

        def run(factors: list[torch.Tensor] = factors) -> None:
            x = factors[0]
            for factor in factors[1:]:
                x = x * factor
            torch.autograd.grad(x.sum(), factors)

        with _Kernels() as counted:
            run()
        yield Sample(figure="kernel", work=counted.num, ns=timer(run))


def _groups() -> Iterator[tuple[dist.ProcessGroup, int, int]]:
    """Groups of which this rank is one, with ranks and nodes: halves of a node, a node, all."""
    world = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    sizes = sorted({size for size in (per_node // 2, per_node, world) if size > 1 and world % size == 0})
    for size in sizes:
        group, _ = dist.new_subgroups(size)
        yield group, size, max(1, size // per_node)


def _collectives(timer: _Timer, workload: Workload) -> Iterator[Sample]:
    for group, ranks, nodes in _groups():
        for num_bytes in workload.messages:
            shard = torch.ones(max(1, num_bytes // 4 // ranks), device=timer.device)
            whole = torch.ones(shard.numel() * ranks, device=timer.device)
            on_wire = whole.nbytes * (ranks - 1) // ranks
            for figure, work, run in (
                ("all-gather", on_wire, lambda w=whole, s=shard, g=group: dist.all_gather_single(w, s, group=g)),
                (
                    "reduce-scatter",
                    on_wire,
                    lambda w=whole, s=shard, g=group: dist.reduce_scatter_single(s, w, op=dist.ReduceOp.AVG, group=g),
                ),
                ("all-reduce", 2 * on_wire, lambda w=whole, g=group: dist.all_reduce(w, group=g)),
            ):
                yield Sample(figure=figure, work=work, ns=timer(run, group), num_ranks=ranks, num_nodes=nodes)


def _units(timer: _Timer, workload: Workload) -> Iterator[Sample]:
    """Steps of models of tiny layers: unsharded, each layer a unit that is kept, each layer a unit that reshards.

    What counts is how they differ, so they take turns.
    """
    mesh = init_device_mesh(timer.device.type, (dist.get_world_size(),))
    given = torch.ones(2, 16, device=timer.device)
    runs: dict[tuple[str, int], Callable[[], object]] = {}
    for how in ("plain", "kept", "resharded"):
        for count in workload.units:
            layers = [nn.Linear(16, 16, bias=False) for _ in range(count + 1)]
            model = nn.Sequential(*layers).to(timer.device)
            if how != "plain":
                for layer in layers[:-1]:
                    fully_shard(layer, mesh=mesh, reshard_after_forward=how == "resharded")
                fully_shard(model, mesh=mesh, reshard_after_forward=False)
            runs[how, count] = lambda model=model: model(given).sum().backward()  # type: ignore[misc]
    for run in (*runs.values(), *runs.values()):  # the first step prepares FSDP2's groups and streams
        run()
    for (how, count), ns in timer.by_turns(runs).items():
        yield Sample(figure=f"units {how}", work=count, ns=ns)
