"""Floating point operations of an op.

The formulas are torch's own (``torch.utils.flop_counter``); those that it lacks are added here: grouped matrix
products, attention and recurrent layers as the cpu runs them, and matrix-vector products. An op without a formula
counts 0: it is bound by memory, and its bytes are recorded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
Formula = Callable[[tuple, dict[str, Any], Any], int]


def formula_of(func: torch._ops.OpOverload) -> Formula | None:
    """The formula of an op: from its arguments and its result to operations. ``None`` if it has none."""
    packet = func.overloadpacket
    if packet in _OWN:
        return _OWN[packet]
    known = flop_registry.get(packet)
    if known is None:
        return None
    return lambda args, kwargs, out: int(known(*args, **kwargs, out_val=out))


def _grouped_mm(args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Groups share the rows (or the inner dim), so their number only counts where both sides have it as a dim."""
    left, right = args[0], args[1]
    groups = left.shape[0] if left.dim() == 3 and right.dim() == 3 else 1
    return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _cpu_attention(args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    query, key, value = args[:3]
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward(args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    grad, query, key, value = args[:4]
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _recurrent_layer(args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Input and recurrent products of one layer at each position: ``2 x positions x (numel of both weights)``."""
    given, input_weight, recurrent_weight = args[:3]
    positions = given.numel() // given.shape[-1]
    return 2 * positions * (input_weight.numel() + recurrent_weight.numel())


def _recurrent_layer_backward(args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    return 2 * _recurrent_layer(args, kwargs, out)


def _matrix_vector(args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    return 2 * args[0].numel()


def _added_matrix_vector(args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    return 2 * args[1].numel()


_OWN: dict[Any, Formula] = {
    aten._grouped_mm: _grouped_mm,
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    aten.mkldnn_rnn_layer: _recurrent_layer,
    aten.mkldnn_rnn_layer_backward: _recurrent_layer_backward,
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    aten.addmv: _added_matrix_vector,
}
