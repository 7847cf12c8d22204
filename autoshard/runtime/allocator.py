"""What the device's caching allocator says of itself: CUDA's has counters, a CPU has none."""

import torch

FIGURES = {
    "allocated_peak": "allocated_bytes.all.peak",
    "requested_peak": "requested_bytes.all.peak",
    "reserved_peak": "reserved_bytes.all.peak",
    "inactive_split_peak": "inactive_split_bytes.all.peak",
    "num_retries": "num_alloc_retries",
}
"""Our names and those of ``torch.cuda.memory_stats``. Allocated minus requested is rounding to the block size; reserved
minus allocated is what the allocator keeps."""


def restart_allocator(device_type: str) -> None:
    """Begin the peaks anew."""
    if device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def allocator_figures(device_type: str) -> dict[str, int]:
    """The figures since ``restart_allocator``, empty where the device has no such allocator."""
    if device_type != "cuda":
        return {}
    found = torch.cuda.memory_stats()
    return {name: int(found.get(key, 0)) for name, key in FIGURES.items()}
