"""Small torch models that tests share. Each class is one situation; sizes are small and mostly prime.

``build(name)`` gives a model of ``MODELS`` and its example inputs ``(args, kwargs)``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, HIDDEN = 53, 16


class Block(nn.Module):
    """Norm and a two-layer feed-forward with a residual."""

    def __init__(self, hidden: int = HIDDEN, ffn: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn or 3 * hidden)
        self.down = nn.Linear(ffn or 3 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """A plain stack of equal blocks with a head."""

    def __init__(self, num_layers: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden) for _ in range(num_layers))
        self.head = nn.Linear(hidden, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LanguageModel(nn.Module):
    """Embedding, blocks, norm and head; with ``tied`` the head has the embedding's weight."""

    def __init__(self, tied: bool = False, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class FunctionalHead(nn.Module):
    """The head is no module: the root multiplies by the embedding's weight, through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.block = Block()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.block(self.embed(ids)) @ self.embed.weight.t()


class Nested(nn.Module):
    """Stages of blocks in lists of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x


class Giant(nn.Module):
    """One layer holds almost everything."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 11)
        self.giant = nn.Linear(11, 1009)
        self.leave = nn.Linear(1009, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.relu(self.giant(self.enter(x))))


class Shared(nn.Module):
    """One module object under two names, run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.between = nn.Linear(HIDDEN, HIDDEN)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


class Frozen(nn.Module):
    """A frozen tower under ``no_grad`` before a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Stack(2).requires_grad_(False)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.tower(x)
        return self.head(x)


class Attention(nn.Module):
    """``nn.MultiheadAttention`` reads its ``out_proj`` without calling it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(HIDDEN, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attn(x, x, x, need_weights=False)[0])


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its weights beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.rnn = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, batch_first=True)
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


class Expert(nn.Module):
    """A feed-forward that is one of several."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Experts that run only on the rows that the router sends to them."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, num_experts)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = self.router(x).softmax(-1)
        pick = score.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (pick == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * score[rows, number : number + 1])
        return out


class Checkpointing(nn.Module):
    """Blocks that recompute by themselves."""

    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.enter = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Convolutional(nn.Module):
    """Convolution, batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x.mean((2, 3))))


class OnPath(nn.Module):
    """The vision part runs only where there are pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Stack(1)
        self.text = nn.Linear(5, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, pixels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.text(x)
        if pixels is not None:
            x = x + self.vision(pixels)
        return self.head(x)


def ids(*shape: int) -> torch.Tensor:
    """Token ids that are the same in every run."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % VOCAB


def floats(*shape: int) -> torch.Tensor:
    """Floating point inputs that are the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[tuple, dict[str, Any]]]]] = {
    "stack": (Stack, lambda: ((floats(4, HIDDEN),), {})),
    "language_model": (LanguageModel, lambda: ((ids(2, 7),), {"labels": ids(2, 7)})),
    "tied": (lambda: LanguageModel(tied=True), lambda: ((ids(2, 7),), {"labels": ids(2, 7)})),
    "functional_head": (FunctionalHead, lambda: ((ids(2, 7),), {})),
    "nested": (Nested, lambda: ((floats(4, HIDDEN),), {})),
    "giant": (Giant, lambda: ((floats(4, 7),), {})),
    "shared": (Shared, lambda: ((floats(4, HIDDEN),), {})),
    "frozen": (Frozen, lambda: ((floats(4, HIDDEN),), {})),
    "attention": (Attention, lambda: ((floats(2, 6, HIDDEN),), {})),
    "recurrent": (Recurrent, lambda: ((ids(2, 5),), {})),
    "mixture": (Mixture, lambda: ((floats(6, HIDDEN),), {})),
    "checkpointing": (Checkpointing, lambda: ((floats(4, HIDDEN),), {})),
    "checkpointing_reentrant": (lambda: Checkpointing(True), lambda: ((floats(4, HIDDEN),), {})),
    "convolutional": (Convolutional, lambda: ((floats(2, 3, 6, 6),), {})),
    "on_path": (OnPath, lambda: ((floats(4, 5),), {"pixels": floats(4, HIDDEN)})),
}
"""By name: how to build the model, and example inputs for it."""


def build(name: str, device: str = "cpu") -> tuple[nn.Module, tuple[tuple, dict[str, Any]]]:
    """A model of ``MODELS`` with the same weights in every run, and its example inputs."""
    make, inputs = MODELS[name]
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(11)
        model = make()
    return model, inputs()
