"""Decisions written by hand: units by name, all that a plan says about them worked out from names alone."""

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from autoshard.plan import Axis, Decisions, Precision, Unit


def decide(
    model: nn.Module,
    units: Sequence[tuple[Sequence[str], bool]],
    *,
    shards: int = 2,
    replicas: int = 1,
    shard_dims: dict[str, int] | None = None,
    replicated: Sequence[str] = (),
    **others: Any,
) -> Decisions:
    """Decisions for units given as (modules, reshard), the root last."""
    taken = set(replicated)
    made = []
    for modules, reshard in units:
        owned = {
            key: param
            for key, param in model.named_parameters()
            if key not in taken and any(name == "" or key.startswith(name + ".") for name in modules)
        }
        taken |= set(owned)
        made.append(
            Unit(
                modules=tuple(modules),
                reshard=reshard,
                num_params=len(owned),
                num_bytes=sum(param.numel() * param.element_size() for param in owned.values()),
                digest=hashlib.sha256("\n".join(sorted(owned)).encode()).hexdigest()[:16],
                shard_dims={key: dim for key, dim in (shard_dims or {}).items() if key in owned},
            )
        )
    axes = [Axis(name="shard", size=shards, role="shard")]
    if replicas > 1:
        axes.insert(0, Axis(name="replicate", size=replicas, role="replicate"))
    others.setdefault("precision", Precision())
    return Decisions(mesh=tuple(axes), units=tuple(made), replicated=tuple(replicated), **others)
