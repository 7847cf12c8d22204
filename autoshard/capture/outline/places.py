"""Attributes that only say where a block stands (``layer_idx``), hidden while blocks are recorded.

A hidden attribute is still found, by ``nn.Module.__getattr__``, and each block around it that is being recorded is told
that it was read: such a block may do something else in another place.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from autoshard.capture.outline.pairing import submodules


class Places:
    """The attributes that are hidden now.

    Args:
        placements: pairs (class name, attribute).
    """

    def __init__(self, placements: set[tuple[str, str]]) -> None:
        self._placements = placements
        self._hidden: dict[tuple[int, str], int] = {}
        self._watchers: list[tuple[set[int], set[str]]] = []

    @contextmanager
    def hidden(self, block: nn.Module) -> Iterator[set[str]]:
        """Hide the attributes of a block; the names of those that are read come into the set."""
        parts = {id(part): part for part in submodules(block)}
        watcher: tuple[set[int], set[str]] = (set(parts), set())
        with ExitStack() as undo:
            if not self._watchers:
                undo.enter_context(self._patched())
            self._watchers.append(watcher)
            undo.callback(self._watchers.remove, watcher)
            for part in parts.values():
                self._hide(part, undo)
            yield watcher[1]

    def _hide(self, part: nn.Module, undo: ExitStack) -> None:
        name_of_class = f"{type(part).__module__}.{type(part).__qualname__}"
        attributes = vars(part)
        order = list(attributes)
        found = [name for name in order if type(attributes[name]) is int and (name_of_class, name) in self._placements]
        if not found:
            return
        values = {name: attributes.pop(name) for name in found}
        self._hidden.update({(id(part), name): value for name, value in values.items()})
        undo.callback(self._show, part, order, values)

    def _show(self, part: nn.Module, order: list[str], values: dict[str, int]) -> None:
        for name in values:
            del self._hidden[id(part), name]
        now = {**values, **vars(part)}
        vars(part).clear()
        vars(part).update({name: now[name] for name in (*(n for n in order if n in now), *now)})

    @contextmanager
    def _patched(self) -> Iterator[None]:
        original, hidden = nn.Module.__getattr__, self._hidden

        def read(part: nn.Module, name: str) -> Any:
            found = hidden.get((id(part), name))
            if found is None:
                return original(part, name)
            for parts, names in self._watchers:
                if id(part) in parts:
                    names.add(name)
            return found

        with mock.patch.object(nn.Module, "__getattr__", read):
            yield
