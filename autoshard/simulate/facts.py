"""What the profiles of one captured step share, whatever recomputes: ops and storages as columns."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.cost import Rates, op_ns
from autoshard.ir import CALLER, LOSS, ModelGraph, Region
from autoshard.ir.recent import Recent

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What profiles of one captured step share, whatever recomputes; ops are numbered through.

    Attributes:
        costs: device time of each op.
        launches: kernels that it launches.
        labels: its module and target, for people.
        modules: its module.
        is_recompute: it runs forward code again.
        counted: storages that count as activations.
        nbytes: of these.
        gradients: by parameter, the storage of its whole gradient.
        written: by such a storage, the last op that writes to it.
        touched: by such a storage, the last op that touches it.
        input_reads: by storage of an input, the ops that read it.
    """

    costs: Numbers
    launches: Numbers
    labels: tuple[tuple[str, str], ...]
    modules: tuple[str, ...]
    is_recompute: tuple[bool, ...]
    counted: tuple[int, ...]
    nbytes: Numbers
    gradients: dict[str, int]
    written: dict[int, int]
    touched: dict[int, int]
    input_reads: dict[int, list[int]]


_RECENT: Recent[Facts] = Recent(4)


def facts_of(graph: ModelGraph, reached: Rates) -> Facts:
    """The facts of a captured step on a device; the last few are kept."""
    return _RECENT.get(graph, reached, lambda: _facts(graph, reached))


def _facts(graph: ModelGraph, reached: Rates) -> Facts:
    root = graph.root
    ops = (*root.forward, *root.backward)
    counted, gradients = counted_storages(root)
    is_gradient = set(gradients.values())
    written: dict[int, int] = {}
    touched: dict[int, int] = {}
    for index, op in enumerate(root.backward, len(root.forward)):
        for storage in (*op.inputs, *op.outputs):
            if storage in is_gradient:
                touched[storage] = index
        if op.bytes_written:
            written.update((storage, index) for storage in op.outputs if storage in is_gradient)
    return Facts(
        costs=np.array([op_ns(op, reached) for op in ops], np.int64),
        launches=np.array([0 if op.is_view else 1 for op in ops], np.int64),
        labels=tuple([("the loss" if op.module == LOSS else op.module or "(root)", op.target) for op in ops]),
        modules=tuple([op.module for op in ops]),
        is_recompute=tuple([op.is_recompute for op in ops]),
        counted=counted,
        nbytes=np.array([root.storages[index].nbytes for index in counted], np.int64),
        gradients=gradients,
        written=written,
        touched=touched,
        input_reads=input_reads(root),
    )


def counted_storages(root: Region) -> tuple[tuple[int, ...], dict[str, int]]:
    """Storages that count as activations, and those of whole gradients by parameter."""
    counted: list[int] = []
    gradients: dict[str, int] = {}
    for index, storage in enumerate(root.storages):
        if storage.kind in ("input", "buffer"):
            continue
        # A gradient that autograd adds to another one dies in the region: it is a temporary like any other.
        if storage.kind == "gradient" and storage.dies == CALLER and storage.param not in gradients:
            gradients[storage.param] = index
            continue
        counted.append(index)
    return tuple(counted), gradients


def input_reads(root: Region) -> dict[int, list[int]]:
    """By storage of an input, the ops that read it, numbered through."""
    inputs = {index for index, storage in enumerate(root.storages) if storage.kind == "input"}
    found: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate((*root.forward, *root.backward)):
        for storage in inputs.intersection(op.inputs):
            found[storage].append(index)
    return found
