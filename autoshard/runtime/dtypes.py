"""The precision of a plan as FSDP2's policy."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.errors import PlanFormatError
from autoshard.plan import Precision


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """FSDP2's policy for a plan's precision; ``same`` becomes ``None``, which is FSDP2's word for it.

    Raises:
        PlanFormatError: a dtype that torch does not have.
    """
    return MixedPrecisionPolicy(
        param_dtype=_dtype(precision.param, "$.precision.param"),
        reduce_dtype=_dtype(precision.reduce, "$.precision.reduce"),
        output_dtype=_dtype(precision.output, "$.precision.output"),
        cast_forward_inputs=precision.cast_inputs,
    )


def _dtype(name: str, where: str) -> torch.dtype | None:
    if name == "same":
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanFormatError(where, f"{name!r} is not a dtype of torch {torch.__version__}")
    return dtype
