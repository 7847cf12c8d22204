"""What ``flash_attn`` offers to a model, for a machine without it: the same arguments, results and saved tensors.

On fake tensors the kernel that torch itself ships is called (``aten._flash_attention_forward``, of the same origin): it
has shapes and a derivative on any build, and keeps for backward what flash_attn keeps, the query, key, value and
output, the logarithm of the softmax's sums in float32 and the state of the random numbers. On real tensors attention is
computed by plain products, which is slow and right.

Source of the signatures and of the padding of the head dim: the documentation of flash_attn 2. Queries have the shape
``[batch, seq, heads, head_dim]``; of packed sequences ``[tokens, heads, head_dim]``, with their borders in
``cu_seqlens``.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten
Window = tuple[int, int]
EVERYWHERE: Window = (-1, -1)
MULTIPLE = 8
"""The kernel takes head dims that are multiples of it; others are padded."""


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of whole sequences; key and value may have fewer heads."""
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    if isinstance(q, FakeTensor):
        out, sums = _kernel(q, k, v, (None, None), (q.shape[1], k.shape[1]), dropout_p, causal, scale, window_size)
    else:
        bias = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 2 else alibi_slopes[None]
        options: dict[str, Any] = {"causal": causal, "window": window_size, "softcap": softcap, "dropout": dropout_p}
        out, sums = _products(q, k, v, scale, bias, **options)
    return (out, sums, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of sequences that are packed one after the other."""
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    if isinstance(q, FakeTensor):
        borders, longest = (cu_seqlens_q, cu_seqlens_k), (int(max_seqlen_q), int(max_seqlen_k))
        out, sums = _kernel(q, k, v, borders, longest, dropout_p, causal, scale, window_size)
        return (out, sums, None) if return_attn_probs else out
    outs, all_sums = [], []
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for number, (start_q, start_k) in enumerate(zip(ends_q[:-1], ends_k[:-1], strict=True)):
        query = q[start_q : ends_q[number + 1]][None]
        key, value = (part[start_k : ends_k[number + 1]][None] for part in (k, v))
        bias = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[number]
        options: dict[str, Any] = {"causal": causal, "window": window_size, "softcap": softcap, "dropout": dropout_p}
        out, sums = _products(query, key, value, scale, None if bias is None else bias[None], **options)
        outs.append(out[0])
        all_sums.append(sums[0])
    out, sums = torch.cat(outs), torch.cat(all_sums, dim=-1)
    return (out, sums, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``flash_attn_func`` of one tensor ``[batch, seq, 3, heads, head_dim]``."""
    q, k, v = qkv.unbind(dim=2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``flash_attn_func`` of keys and values in one tensor ``[batch, seq, 2, heads, head_dim]``."""
    k, v = kv.unbind(dim=2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """``flash_attn_varlen_func`` of one tensor ``[tokens, 3, heads, head_dim]``."""
    q, k, v = qkv.unbind(dim=1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``flash_attn_varlen_func`` of keys and values in one tensor ``[tokens, 2, heads, head_dim]``."""
    k, v = kv.unbind(dim=1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: tuple[Tensor | None, Tensor | None],
    longest: tuple[int, int],
    dropout: float,
    causal: bool,
    scale: float,
    window: Window,
) -> tuple[Tensor, Tensor]:
    """Shapes, derivative and saved tensors of the CUDA kernel; fake tensors only."""
    head_dim = q.shape[-1]
    if missing := -head_dim % MULTIPLE:
        q, k, v = (F.pad(part, (0, missing)) for part in (q, k, v))
    left, right = (None if size < 0 else size for size in window)
    made = aten._flash_attention_forward(
        q, k, v, *borders, *longest, dropout, causal, False, scale=scale, window_size_left=left, window_size_right=right
    )
    return (made[0][..., :head_dim] if missing else made[0]), made[1]


def _products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    slopes: Tensor | None,
    *,
    causal: bool,
    window: Window,
    softcap: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Attention by plain products in float32, and the logarithms of the sums.

    A query sees the keys up to its own place counted from the end, as flash_attn 2.1 and later have it.
    """
    query, key, value = (part.transpose(1, 2).float() for part in (q, k, v))
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(k.shape[1])[None, :] - (torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1])
    if slopes is not None:
        scores = scores - slopes[:, :, None, None].float() * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden = hidden | (distance > right) if right >= 0 else hidden
    hidden = hidden | (distance < -left) if left >= 0 else hidden
    scores = scores.masked_fill(hidden, -math.inf)
    sums = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - sums[..., None].clamp_min(torch.finfo(torch.float32).min))  # a query may see no key
    return (F.dropout(weights, dropout) @ value).transpose(1, 2).to(q.dtype), sums


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of ``x`` by number."""
    return x[indices]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens that a mask ``[batch, seq]`` keeps, packed.

    Returns:
        The tokens ``[tokens, ...]``, their numbers in the flat batch, the borders of the sequences, the length of the
        longest, and the length of each.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = kept.sum(dim=-1, dtype=torch.int32), attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero(as_tuple=False).flatten()
    borders = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, borders, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of ``unpad_input``: ``[batch, seqlen, ...]`` with zeros where no token was."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
