"""Which collectives FSDP2 issues: recorded where it calls ``torch.distributed``.

FSDP2 calls the functions of ``torch.distributed`` by name, so they can be replaced while a step runs. Collectives that
tensors issue by themselves (a ``DTensor`` that is redistributed, a norm over all ranks) take another way and are not
FSDP2's; they are not recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

KINDS = {
    "all_gather_single": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
}
"""Functions by name; the older names of the first two pairs are what torch before 2.13 calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective.

    Attributes:
        kind: ``all-gather``, ``reduce-scatter`` or ``all-reduce``.
        dtype: dtype name of its buffer.
        num_bytes: bytes of its large side: the output of an all-gather, the input of a reduce-scatter, the buffer of
            an all-reduce.
        group_size: ranks that take part.
    """

    kind: str
    dtype: str
    num_bytes: int
    group_size: int


@contextmanager
def record_collectives() -> Iterator[list[Collective]]:
    """Record the collectives that FSDP2 issues on this rank, in order, until the block ends.

    Examples:
        >>> with record_collectives() as issued:
        ...     pass  # a training step of a sharded model
        >>> issued
        []
    """
    issued: list[Collective] = []
    originals = {name: getattr(dist, name) for name in KINDS if hasattr(dist, name)}
    try:
        for name, original in originals.items():
            setattr(dist, name, _recording(KINDS[name], original, issued))
        yield issued
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _recording(kind: str, original: Callable[..., Any], issued: list[Collective]) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        large = max((one for one in values if isinstance(one, torch.Tensor)), key=torch.Tensor.numel)
        group = next((one for one in values if isinstance(one, dist.ProcessGroup)), None)
        issued.append(
            Collective(
                kind=kind,
                dtype=str(large.dtype).removeprefix("torch."),
                num_bytes=large.numel() * large.element_size(),
                group_size=dist.get_world_size(group),
            )
        )
        return original(*args, **kwargs)

    return recorded
