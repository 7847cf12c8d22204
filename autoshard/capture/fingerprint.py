"""What a plan's fingerprint is made of, read from a model."""

from torch import nn

from autoshard.capture.tree import ModuleTree, dtype_name
from autoshard.plan.fingerprint import FingerprintItems


def fingerprint_items(model: nn.Module) -> FingerprintItems:
    """Parameters and buffers of a model as plain values; sharded parameters count with their whole shape."""
    tree = ModuleTree(model)
    return FingerprintItems(
        params=tuple(
            (
                key,
                tuple(entry.aliases),
                tuple(entry.param.shape),
                dtype_name(entry.param.dtype),
                entry.param.requires_grad,
            )
            for key, entry in sorted(tree.params.items())
        ),
        buffers=tuple(sorted(tree.buffers)),
    )
