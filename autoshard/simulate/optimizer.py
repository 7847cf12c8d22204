"""Bytes and time of the optimizer: its state between steps, and what a step needs on top.

The rules are those of torch 2.13's implementations. Accelerators take the foreach form, cpu the loop over parameters
(``torch/optim/optimizer.py``, ``_default_to_fused_or_foreach``: cpu is no foreach device):

- AdamW keeps two moments shaped like the parameter (``optim/adam.py``, ``_init_group``) and a step count of 4 bytes
  that lies on the host unless the device is the host. The foreach form makes one list of roots of the second moment for
  each dtype (``_multi_tensor_adam``: ``_foreach_sqrt``), and the list of one dtype is still bound while the next is
  made. The loop makes a root and its quotient for each parameter (``_single_tensor_adam``: ``denom``), and the quotient
  of the parameter before is still bound.
- SGD works in place (``optim/sgd.py``); with momentum it keeps one buffer shaped like the parameter.

Shards of rank 0 are counted: where a parameter does not divide evenly, the first rank has as many rows as the padded
shard, the last ones fewer.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.cost import Rates, copy_ns
from autoshard.ir.tree import Tree
from autoshard.plan import Decisions
from autoshard.simulate.units import UnitSizes

STEP_COUNT_BYTES = 4
MOMENTS = {"adamw": 2, "sgd": 0, "sgd-momentum": 1}
PASSES = {"adamw": 20, "sgd": 3, "sgd-momentum": 8}
"""Times that a step reads or writes an array shaped like the parameters: AdamW decays the weights (2), updates the
moments (3 + 2 + 3), takes the root, divides, adds (2 + 2 + 2), updates the weights (4); SGD updates the weights (3);
momentum scales the buffer, adds the gradient (2 + 3), updates the weights (3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSizes:
    """What the optimizer holds and needs.

    Attributes:
        state_bytes: kept between steps.
        temporary_bytes: most that a step allocates on top.
        step_ns: device time of a step.
    """

    state_bytes: int
    temporary_bytes: int
    step_ns: int


def optimizer_sizes(
    name: str, tree: Tree, ran: Iterable[UnitSizes], decisions: Decisions, device_kind: str, reached: Rates
) -> OptimizerSizes:
    """Sizes of an optimizer over all parameters that get a gradient.

    Args:
        name: ``adamw``, ``sgd`` or ``sgd-momentum``.
        tree: of the model.
        ran: the units that run in the step; the parameters of others never get a gradient.
        decisions: the plan.
        device_kind: torch's device type.
        reached: the device's rates.
    """
    shards = {key: gradient.sharded_bytes for unit in ran for key, gradient in unit.gradients}
    replicated = frozenset(decisions.replicated)
    trained = []
    for key, param in tree.params.items():
        if key in shards and (param.gets_grad or decisions.reduce_unused):
            trained.append((param.dtype, shards[key]))
        elif key in replicated and param.requires_grad and param.gets_grad:
            trained.append((param.dtype, param.nbytes))
    total = sum(size for _, size in trained)
    state = MOMENTS[name] * total
    if name == "adamw" and device_kind == "cpu":
        state += STEP_COUNT_BYTES * len(trained)
    return OptimizerSizes(
        state_bytes=state,
        temporary_bytes=_temporaries(name, trained, device_kind),
        step_ns=copy_ns(PASSES[name] * total, reached),
    )


def _temporaries(name: str, trained: list[tuple[str, int]], device_kind: str) -> int:
    if name != "adamw" or not trained:
        return 0
    if device_kind == "cpu":
        sizes = [size for _, size in trained]
        return max(2 * size + before for size, before in zip(sizes, [0, *sizes[:-1]], strict=True))
    by_dtype: dict[str, int] = defaultdict(int)
    for dtype, size in trained:
        by_dtype[dtype] += size
    sums = list(by_dtype.values())
    return max(size + before for size, before in zip(sums, [0, *sums[:-1]], strict=True))
