"""The device mesh: what is there, and the one that a plan asks for.

Sizes are read without any communication, so that ``match`` can compare them before the ranks have spoken to each
other; making a mesh of two axes creates process groups and comes after ``agree``.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.errors import ApplyError, Difference
from autoshard.plan import Decisions


def mesh_differences(decisions: Decisions, mesh: DeviceMesh | None) -> tuple[Difference, ...]:
    """In what a given mesh, or the default process group, is not the mesh of the plan.

    A plan of one axis may meet a group of another size: no difference, see ``found_num_shards``.
    """
    planned = " x ".join(f"{axis.name} {axis.size}" for axis in decisions.mesh)
    if mesh is None:
        if not dist.is_available() or not dist.is_initialized():
            return (_difference(planned, "no process group: call torch.distributed.init_process_group first"),)
        world = dist.get_world_size()
        if len(decisions.mesh) > 1 and world != decisions.num_devices:
            return (_difference(f"{planned} = {decisions.num_devices} devices", f"a process group of {world}"),)
        return ()
    found = " x ".join(str(size) for size in mesh.shape)
    if mesh.ndim != len(decisions.mesh):
        return (_difference(planned, f"a mesh of {mesh.ndim} axes ({found})"),)
    if mesh.ndim > 1 and tuple(mesh.shape) != tuple(axis.size for axis in decisions.mesh):
        return (_difference(planned, f"a mesh of {found}"),)
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        return (_difference(planned, f"a mesh of {found} without names: give mesh_dim_names"),)
    return ()


def found_num_shards(decisions: Decisions, mesh: DeviceMesh | None) -> int:
    """Size of the shard axis that is there. Only valid where ``mesh_differences`` is empty."""
    if mesh is not None:
        return int(mesh.shape[-1])
    return dist.get_world_size() if len(decisions.mesh) == 1 else decisions.num_shards


def make_mesh(model: nn.Module, decisions: Decisions, mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh to shard over: the given one, or a new one over the default process group.

    Raises:
        ApplyError: torch cannot make the mesh.
    """
    if mesh is not None:
        return mesh
    shape = (dist.get_world_size(),) if len(decisions.mesh) == 1 else tuple(axis.size for axis in decisions.mesh)
    names = tuple(axis.name for axis in decisions.mesh)
    try:
        return init_device_mesh(_device_type(model), shape, mesh_dim_names=names)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ApplyError((), "shard", f"no device mesh of shape {shape}: {error}") from error


def _device_type(model: nn.Module) -> str:
    """Where the parameters are; from cpu or meta they go to the accelerator, if the process group can serve it."""
    for param in model.parameters():
        if param.device.type not in ("cpu", "meta"):
            return param.device.type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_backend() in ("gloo", "fake"):
        return "cpu"
    return accelerator.type


def _difference(planned: str, found: str) -> Difference:
    return Difference(where="mesh", planned=planned, found=found)
