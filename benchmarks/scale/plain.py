"""A decoder of 48 layers in plain torch: what a plan takes where no library has to be imported."""

import torch
from torch import nn

DIM, DEPTH, VOCAB = 2048, 48, 32000


class Block(nn.Module):
    """A transformer's layer before its norms were moved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the two products."""
        q, k, v = (part.unflatten(-1, (16, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


def build_model() -> nn.Module:
    """Embedding, layers, head."""
    return nn.Sequential(nn.Embedding(VOCAB, DIM), *(Block() for _ in range(DEPTH)), nn.Linear(DIM, VOCAB))


def example_inputs(batch: int | None = None, seq: int | None = None) -> tuple[tuple[torch.Tensor], dict[str, object]]:
    """Token ids."""
    return (torch.zeros(batch or 1, seq or 2048, dtype=torch.long),), {}
