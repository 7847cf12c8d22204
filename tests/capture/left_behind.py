"""Modules that keep tensors of a step outside their own attributes, each in another way."""

import functools
from typing import Any

import torch
from torch import nn

CACHE: dict[Any, Any] = {"before": 1}
LIST: list[Any] = []
LAST: Any = None


@functools.lru_cache(maxsize=4)
def angles(length: int) -> torch.Tensor:
    """A table that every step of a length shares."""
    return torch.arange(length, dtype=torch.float32)


@functools.cache
def untouched(length: int) -> int:
    """Nothing in the step asks it."""
    return length


class Table:
    """A plain object with a cache of its own, and one for its class."""

    shared: dict[int, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.own: torch.Tensor | None = None
        self.by_length: dict[int, torch.Tensor] = {}
        self.count = 0

    @staticmethod
    @functools.lru_cache(None)
    def scale(length: int) -> torch.Tensor:
        """A cached method."""
        return torch.ones(length)


GLOBAL_TABLE = Table()


class Keeps(nn.Module):
    """Keeps the tensors of its step wherever ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how, self.table, self.tables = nn.Linear(4, 4), how, Table(), [Table()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One of many ways."""
        global LAST
        y = self.lin(x)
        match self.how:
            case "global dict":
                CACHE[4] = y
                CACHE["nested"] = {"deep": [y]}
            case "global list":
                LIST.append((y, x))
            case "global name":
                LAST = y
            case "global object":
                GLOBAL_TABLE.own = y
                GLOBAL_TABLE.by_length[4] = y
            case "class attribute":
                Table.shared[4] = y
            case "attribute of an object":
                self.table.own = y
                self.table.by_length[4] = y
                self.tables[0].own = y
            case "lru_cache":
                y = y + angles(4)
            case "cached static method":
                y = y + Table.scale(4)
            case "a parameter":
                CACHE["weight"] = self.lin.weight
            case "an input":
                LIST.append(x)
        return y


def closed_over(forward: Any = None) -> nn.Module:
    """A module whose forward keeps its result in a closure."""
    kept: list[torch.Tensor] = []

    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.lin(x))
            return kept[-1]

    return Closed()
