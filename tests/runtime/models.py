"""Small models whose sizes are primes or odd, so that a wrong sum or a forgotten padding shows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCABULARY, CLASSES = 14, 37, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, WIDTH, bias=False)
        self.expand = nn.Linear(WIDTH, 22)
        self.shrink = nn.Linear(22, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + torch.tanh(self.attend(y)) + self.shrink(F.gelu(self.expand(y)))


class Stack(nn.Module):
    """A plain stack; the root owns a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.gain)

    def training_step(self, x: Tensor) -> Tensor:
        """An entry other than forward."""
        return self(x).square().mean() + self.gain.sum() * 1e-3


class TiedLM(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class TiedEnds(nn.Module):
    """Two modules that run one after the other and share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(self.enter(x))))))


class Scaled(nn.Module):
    """A model with a scalar parameter, which cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale.exp()


class Branches(nn.Module):
    """Takes one of two ways, by the sign of the first input; two ranks take different ones in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, WIDTH)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        way = self.left if x[0, 0] > 0 else self.right
        return self.head(torch.tanh(way(self.enter(x))))


def inputs(model: nn.Module, step: int, rank: int) -> Tensor:
    """What one rank trains on in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if isinstance(model, TiedLM):
        return torch.randint(VOCABULARY, (2, 7), generator=generator)
    x = torch.randn(4, 3, generator=generator)
    if isinstance(model, Branches):
        x[0, 0] = x[0, 0].abs() * (-1) ** (step + rank)
    return x


def loss_of(output: Tensor) -> Tensor:
    return output if output.ndim == 0 else output.float().square().mean()
