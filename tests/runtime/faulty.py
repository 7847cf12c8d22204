"""Models with one fault each: a plan of the obvious units fails or trains wrongly. One width, so that ops fit."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

WIDTH = 64


class Opaque:
    """A result into which FSDP2 does not look."""

    def __init__(self, h: Tensor) -> None:
        self.h = h


@dataclass
class Clear:
    """A result into which it does."""

    h: Tensor


class Pair(nn.Module):
    """Two linear layers; the weight of the second is kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.down(torch.relu(self.up(x))))


class OpaquePair(Pair):
    result = Opaque

    def forward(self, x):
        return self.result(super().forward(x.h if isinstance(x, Opaque | Clear) else x))


class ClearPair(OpaquePair):
    result = Clear


class Passed(nn.Module):
    """Pairs that hand objects to each other."""

    def __init__(self, pair: type[nn.Module] = OpaquePair) -> None:
        super().__init__()
        self.first, self.second = pair(), pair()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).h)


class StashingPair(Pair):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        self.extra = self.down(h).square().mean()
        return h


class Stashed(nn.Module):
    """Blocks that keep a part of the loss on themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = StashingPair(), StashingPair()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(self.second(self.first(x)))
        return h.sum() + self.first.extra + self.second.extra


class OpaqueRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(self.linear(x))


class FunctionalHead(nn.Module):
    """The embedding is read without being called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.block = Pair()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.block(self.embed(tokens)), self.embed.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.block = Pair()
        self.head = nn.Linear(WIDTH, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


class Attention(nn.Module):
    """Reads the weight of ``out_proj`` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x, need_weights=False)[0]


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.nothing.sum()


class InPlace(nn.Module):
    """A unit's result is a view (a linear layer with bias on three dims), and the parent changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(self.enter(x)))


class OutOfPlace(InPlace):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()


class Alias(nn.Module):
    """A list keeps a second reference to a weight, which is exchanged for the sharded one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.cache = [self.scale]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.cache[0]


class DirectCall(nn.Module):
    """Calls a child's forward past its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pair(), Pair()

    def forward(self, x: Tensor) -> Tensor:
        return self.second.forward(self.first(x))


class LeftOver(nn.Module):
    """The module that is called last of two does not reach the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pair(), Pair()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.second(x.detach())
        return self.head(h)


class TableBefore(nn.Module):
    """A buffer, which mixed precision never casts, makes the input of the head float32."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enter(x) + self.table)


class Branches(nn.Module):
    """Parallel branches on one input that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Pair() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(branch(x) for branch in self.branches))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = Pair(), Pair()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Fork(nn.Module):
    """Takes one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Pair(), Pair()

    def forward(self, x: Tensor, is_left: bool) -> Tensor:
        return self.left(x) if is_left else self.right(x)


class UnevenFork(Fork):
    """Its two ways have parameters of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Linear(WIDTH, WIDTH)


class Waiting(nn.Module):
    """One of two ranks stands still in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Pair(), WaitingPair()

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x))


class WaitingPair(Pair):
    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self, FSDPModule):  # not in the reference
            time.sleep(1000 * dist.get_rank())
        return super().forward(x)


class Diverging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.nan


class Dropping(nn.Module):
    """Draws random numbers and keeps statistics of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x))


class Remembering(nn.Module):
    """Writes to its weight in forward; nothing is raised where that is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Shrinking(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.linear(x))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


class Shrinking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.data.mul_(0.5)
        return super().forward(x)


class Stack(nn.Module):
    """Nothing is wrong with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def frozen_base() -> Stack:
    """A layer that does not train, in another dtype than the trained part of its unit."""
    model = Stack()
    model.layers[0].up.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    model.layers[2].register_parameter("codes", nn.Parameter(torch.zeros(5, dtype=torch.uint8), requires_grad=False))
    return model


class Cast(Pair):
    """Computes in bfloat16 between float32 neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


def two_dtypes() -> Stack:
    """A unit that is stored in bfloat16 beside units in float32."""
    model = Stack()
    model.layers[1] = Cast().bfloat16()
    return model
