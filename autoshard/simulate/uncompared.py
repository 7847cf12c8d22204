"""What the figures leave out or nobody could compare with a device here, each with its size where it has one.

Sizes that are headroom are those of the device's profile; the default allowance keeps them back by name.
"""

from autoshard.ir import ModelGraph
from autoshard.request import Question
from autoshard.simulate.optimizer import MOMENTS
from autoshard.simulate.profile import alive_activations
from autoshard.simulate.timeline import Timeline
from autoshard.sizes import format_bytes

ROUNDING_BYTES = 512
"""CUDA's caching allocator rounds every block up to a multiple (``c10/cuda/CUDACachingAllocator.cpp``:
``kMinBlockSize``)."""

_KERNELS = {"_flash_attention": "flash", "_efficient_attention": "memory-efficient"}


def not_modelled(timeline: Timeline, graph: ModelGraph, question: Question) -> tuple[str, ...]:
    """One phrase for each; those that a device would settle begin with ``not compared with a device``.

    Args:
        timeline: the step.
        graph: from which it was made.
        question: for the device and the optimizer.
    """
    found = []
    if question.profile.kind != "cpu":
        found = [f"not compared with a device: {what}" for what in _uncompared(timeline, graph, question)]
    else:
        found.append("scratch memory that kernels allocate for themselves")
    return (*found, "skew between ranks")


def _uncompared(timeline: Timeline, graph: ModelGraph, question: Question) -> list[str]:
    headroom = {part.name: format_bytes(part.num_bytes) for part in question.profile.headroom}
    found = [
        f"attention kernels ({', '.join(kernels)}), which make {format_bytes(size)} of activations by the rule of "
        "torch's selection"
        for kernels, size in [_attention(graph)]
        if kernels
    ]
    count = _num_tensors(timeline, graph, question)
    found.append(
        f"rounding of the allocator, at most {format_bytes(ROUNDING_BYTES * count)} for {count} tensors at the peak"
    )
    if question.optimizer == "adamw-fused":
        found.append("the fused optimizer, 0 B on top of its state as on the CPU")
    if question.optimizer == "adamw-8bit":
        size = format_bytes(timeline.setup.optimizer.temporary_bytes)
        found.append(f"temporaries of the compiled 8-bit optimizer, {size} taken for them")
    found += [f"{_HEADROOM.get(name, name)}, headroom {size}" for name, size in headroom.items()]
    return found


_HEADROOM = {
    "context": "context, kernel scratch and library handles",
    "fragmentation": "segments and fragmentation of the allocator",
}


def _attention(graph: ModelGraph) -> tuple[list[str], int]:
    """Kernels that the step runs in forward, and bytes of what they make."""
    kernels: set[str] = set()
    size = 0
    for op in graph.root.forward if graph.regions else ():
        for part, name in _KERNELS.items():
            if part in op.target:
                kernels.add(name)
                size += sum(graph.root.storages[index].nbytes for index in op.outputs)
    return sorted(kernels), size


def _num_tensors(timeline: Timeline, graph: ModelGraph, question: Question) -> int:
    """Tensors alive at the peak, at most: each parameter sharded, whole, with a gradient and its moments."""
    summit = max(timeline.summits, key=lambda each: each.high)
    profile = timeline.setup.profile
    event = timeline.events[summit.event]
    moments = MOMENTS.get(question.optimizer, 2)
    num = sum(2 * len(unit.keys) + (1 + moments) * len(unit.gradients) for unit in timeline.setup.units)
    if not graph.regions:
        return num
    alive = alive_activations(graph, profile.recompute, op=summit.high_op, position=event.start)
    return num + sum(1 for _ in alive)
