"""The attention kernel that the target device would pick, on a machine that may not have it.

On cpu tensors torch picks the cpu's kernels, which keep other activations than CUDA's do (up to 6.5 times as many
bytes: attention by plain matrix products keeps a matrix of sequence by sequence). For a CUDA target the choice is
made here, by the rules of torch's own selection (flash, else memory-efficient, else plain products), and the CUDA op
itself is run on the fake tensors: it has shapes and a derivative on any build of torch.

``scaled_dot_product_attention`` is intercepted twice: by a function mode for names that were bound early, and in
``torch.nn.functional`` because inside ``F.multi_head_attention_forward`` function modes are off.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autoshard.capture.dtype_reads import DtypeReads
from autoshard.capture.fitting import fitted
from autoshard.capture.values import Values

aten = torch.ops.aten

INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_PLAIN = torch._C._nn.scaled_dot_product_attention
HALF = (torch.float16, torch.bfloat16)
FLASH_MAX_HEAD_DIM = 256
EFFICIENT_ALIGNMENT = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}
"""The memory-efficient kernel needs a head dim that is a multiple of 16 bytes."""


class TargetFunctions(TorchFunctionMode):
    """Context in which functions do what they do on the target device, and take fake tensors where they need data.

    ``values`` is asked whether sizes were assumed, ``dtype_reads`` sees every function.

    Attributes:
        kernels: how often each attention kernel was picked.
    """

    def __init__(self, device_kind: str, values: Values, dtype_reads: DtypeReads | None = None) -> None:
        super().__init__()
        self._values, self._dtype_reads = values, dtype_reads
        self._is_cuda = device_kind == "cuda"
        self._patches = ExitStack()
        self.kernels: dict[str, int] = {}

    def __enter__(self) -> "TargetFunctions":
        if self._is_cuda:
            self._patches.enter_context(mock.patch.object(F, "scaled_dot_product_attention", self.attention))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Exchange attention and ``torch.tensor`` of tensors; pass on everything else."""
        if self._dtype_reads is not None:
            self._dtype_reads.see(func, args)
        args, kwargs = _on_cpu(func, args, kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is _PLAIN and self._is_cuda:
            return self.attention(*args, **kwargs)
        if func is torch.tensor and args and _holds_tensors(args[0]):
            return _stacked(args[0], **kwargs)
        if func in INDEXING and len(args) > 1:
            args = (args[0], _index(args[1]), *args[2:])
        args, kwargs = fitted(func, args, kwargs, self._values)
        return func(*args, **kwargs)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """``torch.nn.functional.scaled_dot_product_attention`` with CUDA's choice of kernel."""
        kernel = choose_kernel(query, key, value, attn_mask, enable_gqa)
        self.kernels[kernel] = self.kernels.get(kernel, 0) + 1
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kernel == "efficient":
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]


def choose_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, enable_gqa: bool
) -> str:
    """``flash``, ``efficient`` or ``math``: what CUDA picks for these tensors.

    Source: the conditions of torch 2.13's ``sdp_utils_cpp.h`` (shared checks) and the documented limits of the two
    kernels. The choice has not been compared with a GPU.
    """
    head_dim = query.shape[-1]
    if not (query.dim() == key.dim() == value.dim() == 4) or 0 in (query.shape[-2], key.shape[-2]):
        return "math"
    if not (query.shape[0] == key.shape[0] == value.shape[0]) or head_dim != key.shape[-1]:
        return "math"
    heads = query.shape[1], key.shape[1], value.shape[1]
    if heads[1] != heads[2] or (heads[0] != heads[1] and (not enable_gqa or heads[0] % heads[1])):
        return "math"
    is_flash_size = head_dim == value.shape[-1] and head_dim <= FLASH_MAX_HEAD_DIM
    if mask is None and query.dtype in HALF and is_flash_size:
        return "flash"
    alignment = EFFICIENT_ALIGNMENT.get(query.dtype)
    if alignment and heads[0] == heads[1] and head_dim % alignment == 0 and value.shape[-1] % alignment == 0:
        return "efficient"
    return "math"


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    head_dim = query.shape[-1]
    missing = -head_dim % 8
    if missing:  # the kernel takes multiples of 8; torch pads and cuts off
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return out[..., :head_dim] if missing else out


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as the additive bias that the memory-efficient kernel takes."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _on_cpu(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments with every device exchanged for the cpu, where all fake tensors are."""
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "cpu"}
    if func is torch.Tensor.to:
        args = (args[0], *("cpu" if isinstance(part, torch.device | str) else part for part in args[1:]))
    return args, kwargs


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(part, torch.Tensor) for part in value)


def _index(index: Any) -> Any:
    """An index with its sequences of tensors (``x[rows, columns]``, each a tuple of numbers) as stacks."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(_holds_tensors(part) for part in parts):
        return index
    # A tuple by itself is the index of several dims and stays one.
    return tuple(_stacked(part) if _holds_tensors(part) else part for part in parts)


def _stacked(
    parts: Sequence[Any],
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> torch.Tensor:
    """``torch.tensor([fake, fake])``, which would ask for the data, as a stack."""
    tensors = [part if isinstance(part, torch.Tensor) else torch.as_tensor(part) for part in parts]
    made = torch.stack([tensor.detach() for tensor in tensors]).to(device=device, dtype=dtype)
    return made.requires_grad_(requires_grad)
