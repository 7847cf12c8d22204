"""The arguments and results of a block as a hashable form and a list of tensors, and back.

The form holds the containers and every value that is no tensor; a tensor is known by its number in the list and its
layout. Two calls with equal forms and layouts run the same code on tensors of the same kind.
"""

import dataclasses
import enum
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autoshard.capture.containers import MAX_DEPTH, PLAIN
from autoshard.capture.refusals import NotReplayable

Form = tuple[Any, ...]
"""What a value is without its tensors; hashable."""

BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)
"""Values that no call changes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A tensor among arguments, results or gradients without its data.

    Attributes:
        shape: its shape.
        stride: its strides, in elements.
        offset: its first element in the storage.
        dtype: its dtype.
        nbytes: bytes of its storage.
        storage: number of its storage among those of the list.
        twin: number of the first tensor of the list that is the same object.
        requires_grad: autograd follows it.
        is_view: it is a view of another tensor.
        value: a digest of its known value, ``None`` if it has none.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int
    storage: int
    twin: int
    requires_grad: bool
    is_view: bool
    value: Any = None


def flatten(value: Any) -> tuple[Form, list[torch.Tensor]]:
    """The form of a value and the tensors in it, in order.

    Raises:
        NotReplayable: it holds an object that a call may change, or that may hide tensors.
    """
    tensors: list[torch.Tensor] = []
    return _flat(value, tensors, 0), tensors


def unflatten(form: Form, tensors: Sequence[torch.Tensor]) -> Any:
    """The value of a form with these tensors; every container is a new one."""
    kind = form[0]
    if kind == "tensor":
        return tensors[form[1]]
    if kind in ("plain", "identity"):
        return form[1]
    parts = [unflatten(part, tensors) for part in form[2]]
    if kind == "sequence":
        return form[1](parts)
    if kind == "named":
        return form[1](*parts)
    if kind == "mapping":
        return form[1](zip(form[3], parts, strict=True))
    return form[1](**dict(zip(form[3], parts, strict=True)))


def layouts(
    tensors: Sequence[torch.Tensor], digest: Callable[[torch.Tensor], Any] = lambda tensor: None
) -> tuple[Layout, ...]:
    """The layouts of tensors, with which of them share an object or a storage.

    Args:
        tensors: fake tensors.
        digest: of the known value of a tensor.

    Raises:
        NotReplayable: one of them is of another kind.
    """
    storages: dict[int, int] = {}
    objects: dict[int, int] = {}
    found = []
    for number, tensor in enumerate(tensors):
        if type(tensor) is not FakeTensor or tensor.layout is not torch.strided:
            raise NotReplayable(f"it takes or gives a {type(tensor).__name__}, {tensor.layout}")
        storage = tensor.untyped_storage()
        found.append(
            Layout(
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                offset=int(tensor.storage_offset()),
                dtype=tensor.dtype,
                nbytes=storage.nbytes(),
                storage=storages.setdefault(storage._cdata, len(storages)),
                twin=objects.setdefault(id(tensor), number),
                requires_grad=tensor.requires_grad,
                is_view=tensor._is_view(),
                value=digest(tensor),
            )
        )
    return tuple(found)


def _flat(value: Any, tensors: list[torch.Tensor], depth: int) -> Form:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if isinstance(value, PLAIN):
        return ("plain", value, type(value))  # 1 and True are different values
    if isinstance(value, BY_IDENTITY):
        return ("identity", value)
    if depth > MAX_DEPTH:
        raise NotReplayable("its arguments or results are nested too deep")
    kind = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ("named", kind, tuple(_flat(part, tensors, depth + 1) for part in value))
    if kind in (list, tuple):
        return ("sequence", kind, tuple(_flat(part, tensors, depth + 1) for part in value))
    if dataclasses.is_dataclass(value) and all(field.init for field in dataclasses.fields(value)):
        names = tuple(field.name for field in dataclasses.fields(value))
        if set(getattr(value, "__dict__", names)) <= set(names):
            parts = tuple(_flat(getattr(value, name), tensors, depth + 1) for name in names)
            return ("fields", kind, parts, names)
    if kind is dict and all(isinstance(key, PLAIN) for key in value):
        return ("mapping", kind, tuple(_flat(part, tensors, depth + 1) for part in value.values()), tuple(value))
    raise NotReplayable(f"it takes or gives a {kind.__name__}, which a call may change")
