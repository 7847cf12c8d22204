"""A place where a model is sharded without consequences: a fake process group, and everything put back afterwards.

The fake process group has any number of ranks in one process and moves nothing. What ``fully_shard`` does to a model
beside its parameters and attributes (which ``capture`` swaps and restores) is undone here: it changes the classes of
modules, and it remembers each module in a table of its own.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.capture.tree import ModuleTree
from autoshard.errors import RequestError
from autoshard.plan import Decisions


@contextmanager
def fake_mesh(plan: Decisions, world: int | None = None, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """The mesh of a plan over a fake process group, which exists until the block ends.

    Args:
        plan: its axes are those of the mesh.
        world: number of ranks, those of the plan if not given; a plan of one axis only can take another number.
        device_type: torch's type of the device on which the tensors lie.

    Raises:
        RequestError: there is a process group already, or the plan has no mesh of that size.
    """
    if dist.is_initialized():
        raise RequestError(
            "process group",
            f"{dist.get_backend()} of {dist.get_world_size()}",
            "none: a dry run makes a fake one of the plan's size",
            "run it before init_process_group, or in a process of its own",
        )
    shape = tuple(axis.size for axis in plan.mesh)
    if world is not None and world != plan.num_devices:
        if len(shape) > 1:
            raise RequestError("world", world, f"{plan.num_devices}, the devices of a plan of {len(shape)} axes")
        shape = (world,)
    # Registers the backend; it is torch's own, and the only one without processes.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    num_devices = plan.num_devices if world is None else world
    told_by = sys.excepthook  # which torch wraps, to name the rank in tracebacks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_devices)
    try:
        yield init_device_mesh(device_type, shape, mesh_dim_names=tuple(axis.name for axis in plan.mesh))
    finally:
        dist.destroy_process_group()
        sys.excepthook = told_by


@contextmanager
def put_back(tree: ModuleTree) -> Iterator[None]:
    """The modules have the classes that they had, and FSDP2 does not know them any more."""
    classes = [(entry.module, entry.module.__class__) for entry in tree.modules.values()]
    try:
        yield
    finally:
        for module, original in classes:
            if module.__class__ is not original:
                module.__class__ = original
            _module_state_mapping.pop(module, None)
