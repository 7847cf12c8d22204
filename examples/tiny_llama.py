"""A small Llama in plain torch: the configuration of TinyLLama-v0 (4.6 million parameters), random weights.

A model file, as ``autoshard plan`` takes it: ``build_model`` makes the model, ``example_inputs`` the inputs of one
training step. Nothing in it knows of autoshard::

    autoshard plan examples/tiny_llama.py -o plan.json --device cpu --devices 2 --memory 256MiB

The rotary frequencies are computed in forward and not kept in a buffer, so that a model built on the meta device needs
nothing but its parameters.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of a Llama-like decoder."""

    vocabulary: int = 32000
    hidden: int = 64
    intermediate: int = 256
    layers: int = 8
    heads: int = 16
    key_value_heads: int = 16
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads may share one key and value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.key_value_heads = config.heads, config.key_value_heads
        self.head_size = config.hidden // config.heads
        self.theta = config.rope_theta
        self.q_proj = nn.Linear(config.hidden, config.heads * self.head_size, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.key_value_heads * self.head_size, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.key_value_heads * self.head_size, bias=False)
        self.o_proj = nn.Linear(config.heads * self.head_size, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each position to itself and those before it."""
        batch, seq, _ = x.shape
        query = self.q_proj(x).view(batch, seq, self.heads, self.head_size).transpose(1, 2)
        key = self.k_proj(x).view(batch, seq, self.key_value_heads, self.head_size).transpose(1, 2)
        value = self.v_proj(x).view(batch, seq, self.key_value_heads, self.head_size).transpose(1, 2)
        query, key = rotate(query, self.theta), rotate(key, self.theta)
        shared = self.heads != self.key_value_heads
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


def rotate(x: Tensor, theta: float) -> Tensor:
    """Turn each pair of channels by an angle that grows with the position."""
    seq, half = x.shape[-2], x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(seq, device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class FeedForward(nn.Module):
    """The gated feed-forward part of a block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and feed-forward, each with a residual."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """The whole decoder; returns the loss where labels are given, else the logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all weights anew; call it again after ``to_empty`` on a model that was built on meta."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Loss of predicting each next token, or the logits."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def build_model() -> Llama:
    """The model."""
    return Llama(Config())


def example_inputs(batch: int | None = None, seq: int | None = None, seed: int = 0) -> tuple[tuple, dict[str, Tensor]]:
    """Inputs of one training step on one device: random tokens, which are their own labels."""
    return random_tokens(Config().vocabulary, batch or 2, seq or 128, seed)


def random_tokens(vocabulary: int, batch: int, seq: int, seed: int) -> tuple[tuple, dict[str, Tensor]]:
    """Positional and keyword arguments of the forward."""
    tokens = torch.randint(vocabulary, (batch, seq), generator=torch.Generator().manual_seed(seed))
    return (), {"input_ids": tokens, "labels": tokens}
