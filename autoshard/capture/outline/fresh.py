"""Fresh fake tensors of a given layout. To be made while the tracer pauses: they are no ops of the step."""

from typing import Any

import torch

from autoshard.capture.outline.arguments import Layout


def empty(layout: Layout) -> torch.Tensor:
    """A tensor on a new storage of the layout's size; of the layout itself where that fills the storage."""
    if _fills(layout):
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
    return torch.empty(-(-layout.nbytes // layout.dtype.itemsize), dtype=layout.dtype)


def alias(base: torch.Tensor, layout: Layout, *, as_view: bool = False) -> torch.Tensor:
    """The tensor of that layout on the storage of ``base``, which is ``base`` itself unless a view is asked for."""
    assert base.dtype == layout.dtype
    is_it = tuple(base.shape) == layout.shape and base.stride() == layout.stride and not layout.offset
    return base if is_it and not as_view else base.as_strided(layout.shape, layout.stride, layout.offset)


class Border(torch.autograd.Function):
    """Gives an argument of a recording a node that is not the block's. It is never asked for a gradient."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, layout: Layout) -> torch.Tensor:
        """A fresh tensor as the result of a node."""
        ctx.set_materialize_grads(False)
        return empty(layout)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Nothing: what is given to arguments is taken off before."""
        return None, None


def _fills(layout: Layout) -> bool:
    if layout.offset or 0 in layout.shape:
        return not layout.offset and not layout.nbytes
    last = sum((size - 1) * step for size, step in zip(layout.shape, layout.stride, strict=True))
    return (last + 1) * layout.dtype.itemsize == layout.nbytes
