"""Prices: the time of an op and of a collective on a device profile. Imports no torch.

All times are whole nanoseconds, rounded up, so that the same question always has the same answer.
"""

from autoshard.cost.collective import (
    Group,
    Way,
    Wires,
    all_gather_ns,
    all_reduce_ns,
    all_reduce_wires,
    fastest_ns,
    gather_wires,
    reduce_scatter_ns,
    scatter_wires,
)
from autoshard.cost.op import Rates, copy_ns, op_ns, rates

__all__ = [
    "Group",
    "Rates",
    "Way",
    "Wires",
    "all_gather_ns",
    "all_reduce_ns",
    "all_reduce_wires",
    "copy_ns",
    "fastest_ns",
    "op_ns",
    "gather_wires",
    "rates",
    "reduce_scatter_ns",
    "scatter_wires",
]
