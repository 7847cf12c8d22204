"""What is known of an op, and how one runs on fake tensors.

An op is run on fake tensors, or answered from known values; a few need help because their fake versions are stricter or
more lenient than the real ones.
"""

from collections.abc import Iterable
from typing import Any

import torch

from autoshard.capture.answers import Origin
from autoshard.capture.fake import CPU
from autoshard.capture.flops import formula_of
from autoshard.capture.values import COINS, COMPARISONS, DATA_DEPENDENT, DRAWS, MASKED, Values, is_masked

aten = torch.ops.aten

READS_NO_DATA = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided", "sym_size", "sym_stride", "sym_numel", "is_same_size",
    "_has_compatible_shallow_copy_type",
}  # fmt: skip
"""Ops that take a tensor for its shape or dtype only."""
NEEDS_NOTHING = {"sym_size", "sym_stride", "sym_numel", "is_same_size", "_has_compatible_shallow_copy_type"}
"""Those of them whose result is no tensor, so that it does not matter whether the tensor is sharded."""
WRITES_NO_DATA = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
OVERWRITES = {
    "zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_",
}  # fmt: skip
"""Ops in place that do not read what they overwrite."""
PICKS_ROWS = {"embedding", "index", "index_select", "gather", "take", "_embedding_bag"}
"""Ops that read about as much of their first argument as they give back."""

ONE_DTYPE = {"mm", "addmm", "mv", "addmv", "addbmm", "index_add", "index_add_", "index_copy", "index_copy_"}
"""Ops that refuse floating point tensors of different dtypes, which their fake versions do not."""
NORMS = {"native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm"}
"""Ops that refuse parameters of lower precision than their input, which their fake versions do not."""

ANSWERED = {aten._local_scalar_dense.default} | COMPARISONS
"""Ops that give Python values."""


class DtypeClash(RuntimeError):
    """An op that would refuse its tensors' dtypes if they had data."""


class OpFacts:
    """What is known of an op before it runs."""

    __slots__ = (
        "formula",
        "is_pick",
        "is_strict",
        "is_view",
        "name",
        "needs_whole",
        "overwrites",
        "reads_data",
        "target",
        "writes",
        "writes_data",
    )

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self.name, self.target = func._opname, str(func)
        arguments = func._schema.arguments
        self.is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)
        self.writes = [
            (i, None if a.kwarg_only else i, a.name)
            for i, a in enumerate(arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.reads_data = self.name not in READS_NO_DATA
        self.needs_whole = self.name not in NEEDS_NOTHING
        self.writes_data = self.name not in WRITES_NO_DATA
        self.overwrites = self.name in OVERWRITES
        self.is_strict = self.name in ONE_DTYPE or self.name in NORMS
        self.is_pick = self.name in PICKS_ROWS
        self.formula = formula_of(func)

    def written(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments that the op writes to."""
        found: list[torch.Tensor] = []
        for _, position, name in self.writes:
            value = args[position] if position is not None and position < len(args) else kwargs.get(name)
            collect_tensors((value,), found)
        return found


_FACTS: dict[torch._ops.OpOverload, OpFacts] = {}


def facts_of(func: torch._ops.OpOverload) -> OpFacts:
    """What is known of an op before it runs."""
    found = _FACTS.get(func)
    if found is None:
        found = _FACTS[func] = OpFacts(func)
    return found


def tensors_of(args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of an op, in order."""
    tensors: list[torch.Tensor] = []
    collect_tensors(args, tensors)
    if kwargs:
        collect_tensors(kwargs.values(), tensors)
    return tensors


def run_op(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], values: Values, module: str) -> Any:
    """The result of an op on fake tensors, its values where they are known.

    Args:
        func: the op.
        args: its arguments; real tensors among them are constants.
        kwargs: its keyword arguments.
        values: the known values; those of the result are added.
        module: FQN of the module that is running, for what has to be assumed.

    Raises:
        DtypeClash: the op would refuse the dtypes of its tensors.
    """
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": CPU}
    if func is aten._local_scalar_dense.default:
        return values.scalar(args[0], module)
    if func in COMPARISONS:
        return values.agree(func, args, kwargs, module)
    facts = facts_of(func)
    tensors = tensors_of(args, kwargs)
    if facts.is_strict:
        _require_one_dtype(facts.name, tensors)
    return _execute(func, facts, args, kwargs, tensors, values, module)


def _execute(
    func: torch._ops.OpOverload,
    facts: OpFacts,
    args: tuple,
    kwargs: dict[str, Any],
    tensors: list[torch.Tensor],
    values: Values,
    module: str,
) -> Any:
    is_drawn = facts.name in COINS  # never from known values: what a coin shows is an answer
    known = values.evaluate(func, args, kwargs) if not is_drawn and values.may_know(func, tensors) else None
    if func in DATA_DEPENDENT:
        if known is None or values.is_otherwise(tensors):
            return values.concretised(func, args, kwargs, module, values.origin(tensors) if known is not None else None)
        out = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda value: args[0].new_empty(tuple(value.shape), dtype=value.dtype), known
        )
    elif func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
        half = [part.to(torch.bfloat16) for part in args[:2]]  # the fake kernel knows no other dtype
        out = func(*half, *args[2:], **kwargs).to(args[0].dtype)
    elif func in MASKED and is_masked(args):
        out = func(*values.mask_to_indices(args, module), **kwargs)
    else:
        out = func(*args, **kwargs)
    if known is not None:
        drawn = Origin.CHANCE if facts.name in DRAWS else Origin.SAME
        values.keep(out, known, values.origin(tensors) | drawn)
    else:
        for tensor in facts.written(args, kwargs) if facts.writes else ():
            values.forget(tensor)
        values.keep_assumed_results(func, args, kwargs, out)
    return out


def collect_tensors(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Add the tensors among values and in the lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            collect_tensors(value, found)


def _require_one_dtype(op: str, tensors: list[torch.Tensor]) -> None:
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors if tensor.is_floating_point()))
    if len(dtypes) < 2 or (op in NORMS and dtypes[0].itemsize <= dtypes[1].itemsize):
        return
    raise DtypeClash(f"{op} takes tensors of one dtype, got {' and '.join(map(str, dtypes))}")
