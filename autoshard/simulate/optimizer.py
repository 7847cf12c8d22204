"""Bytes and time of the optimizer: its state between steps, and what a step needs on top.

The rules are those of torch 2.13's implementations; ``RULES`` names them. Plain ``adamw`` is the form that torch picks:
foreach on accelerators, the loop over parameters on cpu (``torch/optim/optimizer.py``,
``_default_to_fused_or_foreach``: cpu is no foreach device).

- AdamW keeps two moments shaped like the parameter and a step count of 4 bytes (``optim/adam.py``, ``_init_group``),
  which lies on the host unless the host is the device or the form is fused. The foreach form makes one list of roots
  of the second moment for each dtype (``_multi_tensor_adam``: ``_foreach_sqrt``), and the list of one dtype is still
  bound while the next is made. The loop makes a root and its quotient for each parameter (``_single_tensor_adam``:
  ``denom``), and the quotient of the parameter before is still bound. The fused form allocates nothing.
- AdamW with 8-bit moments is torchao's ``AdamW8bit``, which knows FSDP2's parameters: a shard of at least 4096
  elements that is a multiple of 256 keeps each moment as one byte an element, a float32 scale for each 256 and a table
  of 256 float32 values; a smaller or uneven one keeps it in its own dtype (``torchao/optim/adam.py``, ``_new_buffer``;
  ``subclass_8bit.py``). Its step is compiled parameter by parameter; the moments in float32 of the largest shard are
  taken for its temporaries, which nothing has confirmed.
- SGD works in place (``optim/sgd.py``); with momentum it keeps one buffer shaped like the parameter.

Shards of rank 0 are counted: where a parameter does not divide evenly, the first rank has as many rows as the padded
shard, the last ones fewer.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from autoshard.cost import Rates, copy_ns
from autoshard.ir.tree import Tree
from autoshard.plan import Decisions
from autoshard.request import DTYPE_BYTES
from autoshard.simulate.units import UnitSizes

STEP_COUNT_BYTES = 4
BLOCK_ELEMENTS = 256
"""Elements that share a scale in 8-bit moments, and entries of their table."""
LEAST_8BIT_ELEMENTS = 4096
"""Smaller shards keep moments in their own dtype."""
FLOAT32_BYTES = 4

Form = Literal["foreach", "loop", "fused", "8bit", "in place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How an optimizer is written.

    Attributes:
        moments: arrays shaped like the parameter that it keeps.
        passes: times that a step reads or writes such an array.
        form: what a step allocates follows from it.
    """

    moments: int
    passes: int
    form: Form


_ADAMW_PASSES = 20
"""Decays the weights (2), updates the moments (3 + 2 + 3), takes the root, divides, adds (2 + 2 + 2), updates the
weights (4)."""

RULES: dict[str, Rule] = {
    "adamw-foreach": Rule(moments=2, passes=_ADAMW_PASSES, form="foreach"),
    "adamw-for-loop": Rule(moments=2, passes=_ADAMW_PASSES, form="loop"),
    # Reads weights, gradients and both moments, writes all but the gradients.
    "adamw-fused": Rule(moments=2, passes=7, form="fused"),
    # Reads weights and gradients, writes weights; both moments are read and written at a quarter of the bytes.
    "adamw-8bit": Rule(moments=2, passes=4, form="8bit"),
    "sgd": Rule(moments=0, passes=3, form="in place"),
    # Scales the buffer, adds the gradient (2 + 3), updates the weights (3).
    "sgd-momentum": Rule(moments=1, passes=8, form="in place"),
}


def clip_bytes(num_trained: int) -> int:
    """Temporaries of ``autoshard.clip_grad_norm_``: the norm of each gradient in float32, and their stack."""
    return 2 * FLOAT32_BYTES * num_trained


MOMENTS = {name: rule.moments for name, rule in RULES.items()}
"""Arrays shaped like the parameter that each optimizer keeps; plain ``adamw`` is a form of AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSizes:
    """What the optimizer holds and needs.

    Attributes:
        state_bytes: kept between steps.
        temporary_bytes: most that a step allocates on top.
        step_ns: device time of a step.
        num_trained: parameters that it updates.
    """

    state_bytes: int
    temporary_bytes: int
    step_ns: int
    num_trained: int


_Trained = list[tuple[str, int]]
"""Dtype and bytes of each trained shard."""


def optimizer_sizes(
    name: str, tree: Tree, ran: Iterable[UnitSizes], decisions: Decisions, device_kind: str, reached: Rates
) -> OptimizerSizes:
    """Sizes of an optimizer over all parameters that get a gradient.

    Args:
        name: one of ``request.OPTIMIZERS``.
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
    if name == "adamw":
        name = "adamw-for-loop" if device_kind == "cpu" else "adamw-foreach"
    rule = RULES[name]
    total = sum(size for _, size in trained)
    return OptimizerSizes(
        state_bytes=_state(rule, trained, device_kind),
        temporary_bytes=_temporaries(rule, trained),
        step_ns=copy_ns(rule.passes * total, reached),
        num_trained=len(trained),
    )


def _state(rule: Rule, trained: _Trained, device_kind: str) -> int:
    if rule.form == "8bit":
        state = rule.moments * sum(_moment_8bit(dtype, size) for dtype, size in trained)
    else:
        state = rule.moments * sum(size for _, size in trained)
    counts_on_device = rule.moments == 2 and (device_kind == "cpu" or rule.form == "fused")
    return state + STEP_COUNT_BYTES * len(trained) * counts_on_device


def _moment_8bit(dtype: str, size: int) -> int:
    elements = size // DTYPE_BYTES[dtype]
    if elements < LEAST_8BIT_ELEMENTS or elements % BLOCK_ELEMENTS:
        return size
    return elements + FLOAT32_BYTES * (elements // BLOCK_ELEMENTS) + FLOAT32_BYTES * BLOCK_ELEMENTS


def _temporaries(rule: Rule, trained: _Trained) -> int:
    if not trained or rule.form in ("fused", "in place"):
        return 0
    if rule.form == "8bit":
        return rule.moments * FLOAT32_BYTES * max(size // DTYPE_BYTES[dtype] for dtype, size in trained)
    if rule.form == "loop":
        sizes = [size for _, size in trained]
        return max(2 * size + before for size, before in zip(sizes, [0, *sizes[:-1]], strict=True))
    by_dtype: dict[str, int] = defaultdict(int)
    for dtype, size in trained:
        by_dtype[dtype] += size
    sums = list(by_dtype.values())
    return max(size + before for size, before in zip(sums, [0, *sums[:-1]], strict=True))
