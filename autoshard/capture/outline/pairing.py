"""Two blocks that are alike: module by module, attribute by attribute, object by object.

Equal digests (``structure``) find the pairs; here they are proved. Configuration values count, objects count by what
is in them, and functions by their code and closures. Attributes that only say where a block stands (``layer_idx``)
are left out here, and a block whose forward reads one is not replayed (``recording`` hides them and watches).
"""

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.capture.refusals import Different
from autoshard.capture.tree import ModuleTree

MAX_DEPTH = 5
"""Objects inside objects that are compared; what lies deeper counts as different."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True, slots=True)
class Pairing:
    """What stands for what in two alike blocks.

    Attributes:
        modules: FQNs of the second by those of the first.
        params: parameter keys of the second by those of the first.
        tensors: buffers and tensor attributes of the second, in the order of ``own_tensors`` of the first.
    """

    modules: dict[str, str]
    params: dict[str, str]
    tensors: tuple[torch.Tensor, ...]


def submodules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and everything inside it, in pre-order, each object once."""
    seen: set[int] = set()
    stack = [module]
    while stack:
        found = stack.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        stack += [child for child in reversed(found._modules.values()) if child is not None]


def own_tensors(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Buffers and tensor attributes of a block, each once, in a fixed order."""
    found: dict[int, torch.Tensor] = {}
    for part in submodules(module):
        for tensor in _tensors_on(part):
            found.setdefault(id(tensor), tensor)
    return tuple(found.values())


class Pairer:
    """Compares blocks of one model.

    Args:
        tree: the model's tree, read before its tensors were swapped.
        placements: pairs (class name, attribute) of whole numbers that say only where a module stands.
        same_values: whether two tensors of the model may be taken for each other by their values.
    """

    def __init__(
        self,
        tree: ModuleTree,
        placements: set[tuple[str, str]],
        same_values: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> None:
        self._tree, self._placements, self._same_values = tree, placements, same_values

    def pair(self, first: nn.Module, second: nn.Module) -> Pairing:
        """What stands for what.

        Raises:
            Different: they are not alike.
        """
        partners: dict[int, nn.Module] = {}
        pairs: list[tuple[nn.Module, nn.Module]] = []
        self._walk(first, second, partners, pairs)
        tensors: dict[int, torch.Tensor] = {}
        params: dict[str, str] = {}
        for one, other in pairs:
            self._attributes(one, other, partners)
            for a, b in zip(self._tree.keys_on(one), self._tree.keys_on(other), strict=True):
                if params.setdefault(a, b) != b:
                    raise Different(f"{a} is tied in another way")
            for left, right in zip(_tensors_on(one), _tensors_on(other), strict=True):
                if tensors.setdefault(id(left), right) is not right:
                    raise Different("its buffers are shared in another way")
        names = {self._name(one): self._name(other) for one, other in pairs}
        return Pairing(names, params, tuple(tensors.values()))

    def _name(self, module: nn.Module) -> str:
        return self._tree.fqn_of[id(module)]

    def _walk(
        self,
        one: nn.Module,
        other: nn.Module,
        partners: dict[int, nn.Module],
        pairs: list[tuple[nn.Module, nn.Module]],
    ) -> None:
        stack = [(one, other)]
        while stack:
            a, b = stack.pop()
            if id(a) in partners:
                if partners[id(a)] is not b:
                    raise Different(f"{self._name(a)} is shared in another way")
                continue
            if type(a) is not type(b) or list(a._modules) != list(b._modules) or a.training != b.training:
                raise Different(f"{self._name(b)} is of another form")
            partners[id(a)] = b
            pairs.append((a, b))
            for left, right in zip(reversed(a._modules.values()), reversed(b._modules.values()), strict=True):
                if (left is None) != (right is None):
                    raise Different(f"{self._name(b)} has other children")
                if left is not None and right is not None:
                    stack.append((left, right))

    def _attributes(self, one: nn.Module, other: nn.Module, partners: dict[int, nn.Module]) -> None:
        a, b = self._compared(one), self._compared(other)
        if a.keys() != b.keys():
            raise Different(f"{self._name(other)} has other attributes")
        for name, value in a.items():
            if not self._is_same(value, b[name], one, other, partners, 0):
                raise Different(f"{self._name(other)}.{name} differs")
        for group in ("_parameters", "_buffers"):
            left, right = getattr(one, group), getattr(other, group)
            if list(left) != list(right):
                raise Different(f"{self._name(other)} has other {group[1:]}")
            for name, value in left.items():
                if not self._is_same_tensor(value, right[name]):
                    raise Different(f"{self._name(other)}.{name} differs")

    def _compared(self, module: nn.Module) -> dict[str, Any]:
        """The attributes that have to be alike; what says only where a module stands may be hidden now."""
        name_of_class = f"{type(module).__module__}.{type(module).__qualname__}"
        return {
            name: value
            for name, value in vars(module).items()
            if name not in _OF_EVERY_MODULE and not (type(value) is int and (name_of_class, name) in self._placements)
        }

    def _is_same_tensor(self, a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a is b or (
            type(a) is type(b)
            and a.shape == b.shape
            and a.dtype == b.dtype
            and a.stride() == b.stride()
            and a.requires_grad == b.requires_grad
            and self._same_values(a, b)
        )

    def _is_same(
        self, a: Any, b: Any, one: nn.Module, other: nn.Module, partners: dict[int, nn.Module], depth: int
    ) -> bool:
        if a is b:
            return True
        if type(a) is not type(b) or depth > MAX_DEPTH:
            return False
        if isinstance(a, str):
            return bool(a == b) or _at_place(a, self._name(one)) == _at_place(b, self._name(other))
        if isinstance(a, PLAIN):
            return bool(a == b)
        if isinstance(a, torch.Tensor):
            return self._is_same_tensor(a, b)
        if isinstance(a, nn.Module):
            return partners.get(id(a)) is b

        def same(left: Any, right: Any) -> bool:
            return self._is_same(left, right, one, other, partners, depth + 1)

        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, dict):
            return list(a) == list(b) and all(map(same, a.values(), b.values()))
        if isinstance(a, set | frozenset):
            return bool(a == b)
        if isinstance(a, types.FunctionType):
            cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
            return a.__code__ is b.__code__ and same(cells[0], cells[1]) and same(a.__defaults__, b.__defaults__)
        if isinstance(a, types.MethodType):
            return a.__func__ is b.__func__ and same(a.__self__, b.__self__)
        if isinstance(a, functools.partial):
            return a.func is b.func and same(a.args, b.args) and same(a.keywords, b.keywords)
        if hasattr(a, "__dict__") and not isinstance(a, type):
            return same(vars(a), vars(b)) and not hasattr(type(a), "__slots__")
        return False


def _at_place(text: str, fqn: str) -> str:
    """A text in which the indices of a module's path are left open."""
    indices = {part for part in fqn.split(".") if part.isdigit()}
    return ".".join("#" if part in indices else part for part in text.split("."))


def _tensors_on(module: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers and tensor attributes of one module; parameters are known by their keys."""
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)
    for name, value in vars(module).items():
        if name in _OF_EVERY_MODULE:
            continue
        yield from _tensors_in(value, 0)


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield value
    elif type(value) in (list, tuple, dict) and depth < MAX_DEPTH:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part, depth + 1)
