"""Small real models whose sizes are prime or uneven, one for each situation that FSDP2 treats in its own way."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN, VOCAB, TOKENS = 64, 499, 3


class Mlp(nn.Module):
    """Two matrices of uneven rows and a scale; adds to its input."""

    def __init__(self, width: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden, bias=False)
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x))) * self.scale


class Chain(nn.Module):
    """``layers`` one after another, then perhaps a head that the root owns."""

    def __init__(self, *layers: nn.Module, head: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Parameter(torch.ones(HIDDEN * 5, HIDDEN)) if head else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else F.linear(x, self.head)


class Outer(nn.Module):
    """Own parameters before and after its children."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(257, HIDDEN))
        self.inner = nn.ModuleList(children)
        self.after = nn.Parameter(torch.ones(521, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.linear(x, self.before).sum(-1, keepdim=True)
        for child in self.inner:
            x = child(x)
        return x + F.linear(x, self.after).sum(-1, keepdim=True)


class Language(nn.Module):
    """Embedding, layers, norm and head; with ``tied`` the head has the embedding's weight."""

    def __init__(self, *widths: int, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Mlp(width) for width in widths)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Twice(nn.Module):
    """The first layer runs before and after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = Mlp(997), Mlp(499)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.other(self.shared(x)))


class Partly(nn.Module):
    """A layer that never runs, one with a parameter that nothing reads, and one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.partial = Mlp(499), Mlp(997), Mlp(251)
        self.partial.extra = nn.Parameter(torch.ones(101, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.partial(self.used(x))


class Branches(nn.Module):
    """Parallel branches on an input that needs no gradient: post-backward is deferred to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Mlp(width) for width in (499, 251, 997))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(branch(x) for branch in self.branches)  # type: ignore[return-value]


class Positions(nn.Module):
    """A table of positions (int inputs) is read before every layer: its unit runs three times, always deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(211, HIDDEN)
        self.layers = nn.ModuleList(Mlp(width) for width in (499, 251, 997))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[0])
        for layer in self.layers:
            x = layer(x + self.table(places))
        return x


class KeepsOutputs(nn.Module):
    """Returns what every layer made; the loss takes the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(width) for width in (499, 251))
        self.wide = nn.Linear(HIDDEN, 1009)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.wide(x).softmax(-1)


class Halted(nn.Module):
    """The first layer runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(width) for width in (499, 251, 997))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.layers[0](x)
        return self.layers[2](self.layers[1](x))


class Recomputing(nn.Module):
    """Two modules of own and inner parameters, each of which recomputes in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Outer(Mlp(width), Mlp(251)) for width in (499, 997))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def mixed() -> nn.Module:
    """Layers of which two hold a frozen parameter of another dtype, so that their all-gather goes as bytes."""
    model = Chain(Mlp(499), Mlp(251), Mlp(997))
    for layer, dtype in ((model.layers[0], torch.bfloat16), (model.layers[2], torch.int8)):
        layer.extra = nn.Parameter(torch.ones(101, HIDDEN).to(dtype), requires_grad=False)
    return model


def few_rows() -> nn.Module:
    """A parameter with fewer rows than there are shards."""
    model = Chain(Mlp(499), Mlp(251))
    model.layers[0].scale = nn.Parameter(torch.ones(1, HIDDEN))
    model.layers[1].up = nn.Linear(HIDDEN, 3)
    model.layers[1].down = nn.Linear(3, HIDDEN)
    return model


def buffered() -> nn.Module:
    """A layer with a buffer."""
    model = Chain(Mlp(499), Mlp(251))
    model.register_buffer("table", torch.ones(307, HIDDEN))
    return model


def frozen(model: nn.Module, *prefixes: str) -> nn.Module:
    """The model with the parameters under these FQNs frozen."""
    for name, param in model.named_parameters():
        if name.startswith(prefixes):
            param.requires_grad_(False)
    return model


def floats() -> tuple[Any, ...]:
    """An input of real numbers."""
    return (torch.ones(TOKENS, HIDDEN),)


class Pair(nn.Module):
    """Two layers for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((Mlp(499), Mlp(251)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x) + y)


def twice() -> tuple[Any, ...]:
    """One tensor for two inputs."""
    x = torch.ones(1009, HIDDEN)
    return x, x


def halves() -> tuple[Any, ...]:
    """The same in bf16."""
    return (torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16),)


def ids() -> tuple[Any, ...]:
    """An input of token ids."""
    return (torch.arange(TOKENS).reshape(1, TOKENS) % VOCAB,)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """A loss without parameters."""
    return output.float().pow(2).mean()
