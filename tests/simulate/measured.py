"""A real step of a sharded model on this machine: real CPU tensors, one process, a fake process group.

The values of the step are meaningless (only the own slice of each parameter is right); what is allocated, and which
collectives are issued, is exactly what FSDP2 does at that world size.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.plan import Axis, Decisions, Precision, Unit
from tests.simulate.livebytes import Collectives, LiveBytes

Build = Callable[[], nn.Module]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
    "adamw-foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True),
    "adamw-fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    "adamw-for-loop": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-4),
    "sgd-momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
}


@dataclass(frozen=True)
class Loop:
    """How the training loop runs a step."""

    set_to_none: bool = True
    is_first: bool = False
    clips: bool = False


@dataclass(frozen=True)
class Measured:
    """Bytes of one step, and its collectives."""

    steady: int
    forward_peak: int
    after_forward: int
    backward_peak: int
    after_backward: int
    optimizer_peak: int
    after: int
    collectives: tuple[tuple[str, int, str], ...]

    @classmethod
    def sizes(cls) -> list[str]:
        """Names of the fields that hold bytes."""
        return [field.name for field in fields(cls) if field.name != "collectives"]


def decisions(
    *units: tuple[str, ...] | tuple[tuple[str, ...], bool],
    shards: int = 8,
    replicas: int = 1,
    param: str = "same",
    reduce: str = "same",
    root_reshard: bool = False,
    shard_dims: dict[str, int] | None = None,
    **options: Any,
) -> Decisions:
    """Decisions over units in the order given, the root added; a unit is its modules, or (modules, reshard)."""
    made = []
    for unit in [*units, (("",), root_reshard)]:
        modules, reshard = unit if isinstance(unit[0], tuple) else (unit, True)
        dims = shard_dims or {}
        mine = {key: dim for key, dim in dims.items() if any(key.startswith(f"{fqn}.") for fqn in modules)}
        made.append(
            Unit(modules=modules, reshard=reshard, num_params=0, num_bytes=0, digest="", shard_dims=mine)  # type: ignore[arg-type]
        )
    axes = [Axis(name="shard", size=shards, role="shard")]
    if replicas > 1:
        axes.insert(0, Axis(name="replicate", size=replicas, role="replicate"))
    return Decisions(mesh=tuple(axes), precision=Precision(param=param, reduce=reduce), units=tuple(made), **options)


@contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """A process group of that size in which this process is rank 0 and nobody else exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module, plan: Decisions) -> None:
    """Apply a plan with bare ``fully_shard`` calls."""
    names = tuple(axis.name for axis in plan.mesh)
    mesh = init_device_mesh("cpu", tuple(axis.size for axis in plan.mesh), mesh_dim_names=names)
    dtype = {"same": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
    policy = MixedPrecisionPolicy(param_dtype=dtype[plan.precision.param], reduce_dtype=dtype[plan.precision.reduce])
    for fqn in plan.recompute:
        checkpoint(model.get_submodule(fqn))
    params = dict(model.named_parameters())
    replicated = {params[key] for key in plan.replicated}
    for unit in plan.units:
        modules = [model.get_submodule(fqn) for fqn in unit.modules]
        dims = {params[key]: dim for key, dim in unit.shard_dims.items()}
        fully_shard(
            modules if len(modules) > 1 else modules[0],  # type: ignore[arg-type]
            mesh=mesh,
            reshard_after_forward=unit.reshard,
            mp_policy=policy,
            ignored_params=replicated or None,
            shard_placement_fn=lambda param, dims=dims: Shard(dims[param]) if param in dims else None,
        )
    if replicated:
        ordered = [params[key] for key in plan.replicated]
        for param in ordered[:1]:
            param.register_post_accumulate_grad_hook(
                lambda _: torch.autograd.Variable._execution_engine.queue_callback(lambda: _average(ordered, mesh))
            )
    if plan.reduce_unused:
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]


@torch.no_grad()
def _average(params: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """All of one dtype in one buffer, with one more element for each."""
    grads = [param.grad for param in params if param.grad is not None]
    assert len(grads) == len(params)
    whole = torch.cat([*(grad.reshape(-1) for grad in grads), grads[0].new_ones(len(grads))])
    for axis in range(mesh.ndim):
        dist.all_reduce(whole, group=mesh.get_group(axis))
    parts = whole[: -len(grads)].div_(mesh.size()).split([grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))


def _warm_up(
    build: Build,
    plan: Decisions,
    inputs: Sequence[torch.Tensor],
    loss: Callable[[Any], torch.Tensor],
    optimizer: str,
    named: dict[str, torch.Tensor],
) -> None:
    """A step of another model, so that what torch does once in a process is not counted."""
    model = build()
    shard(model, plan)
    steps = OPTIMIZERS[optimizer](model)
    loss(model(*inputs, **named)).backward()
    steps.step()


def measure(
    build: Build,
    plan: Decisions,
    inputs: Sequence[torch.Tensor],
    loss: Callable[[Any], torch.Tensor],
    optimizer: str,
    keywords: dict[str, torch.Tensor] | None = None,
    loop: Loop | None = None,
) -> Measured:
    """The second step of a model under a plan, or the first; the first one makes the optimizer's state."""
    named = keywords or {}
    with fake_group(plan.num_devices):
        model = build()
        shard(model, plan)
        steps = OPTIMIZERS[optimizer](model)
        loop = loop or Loop()
        if loop.is_first:
            _warm_up(build, plan, inputs, loss, optimizer, named)
        for index in range(1 if loop.is_first else 2):
            counter, recorder = LiveBytes(), Collectives()
            gc.collect()
            with counter:
                counter.track((*model.parameters(), *model.buffers()))
                counter.track(param.grad for param in model.parameters() if param.grad is not None)
                for state in steps.state.values():
                    counter.track(state.values())
                steady = counter.total
                counter.track((*inputs, *named.values()))
                with recorder:
                    for batch in range(plan.micro_batches):
                        is_last = batch == plan.micro_batches - 1
                        model.set_requires_gradient_sync(plan.gradient_sync == "every" or is_last)  # type: ignore[operator]
                        counter.start("forward")
                        value = loss(model(*inputs, **named))
                        after_forward = counter.total
                        counter.start("backward")
                        value.backward()
                        after_backward = counter.total
                        if not is_last:
                            del value
                counter.start("optimizer")
                if loop.clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                steps.step()
                counter.start("after")
                steps.zero_grad(set_to_none=loop.set_to_none)
                after = counter.total
            assert index == 0 or counter.peaks["forward"] > steady
        return Measured(
            steady=steady,
            forward_peak=counter.peaks["forward"],
            after_forward=after_forward,
            backward_peak=counter.peaks["backward"],
            after_backward=after_backward,
            optimizer_peak=counter.peaks["optimizer"],
            after=after,
            collectives=tuple(recorder.log),
        )
