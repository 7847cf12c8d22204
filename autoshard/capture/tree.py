"""The module tree as names: every module, parameter and buffer once, under its first path, with all its aliases.

Identity is object identity (``is``), never names or data pointers: a data pointer is 0 for everything on meta. The
first path in registration order is the one name of a module (its canonical FQN) and of a parameter (its key), as in
``named_modules`` and ``named_parameters``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from autoshard.ir import BufferInfo


@dataclass(slots=True, kw_only=True)
class ModuleEntry:
    """One module object.

    Attributes:
        fqn: its first path.
        module: the object.
        parent: canonical FQN of the module above ``fqn``.
        aliases: its further paths.
        children: canonical FQNs of its children, without repetition.
        params: keys of the parameters registered on it.
        buffers: names of the buffers registered on it.
    """

    fqn: str
    module: nn.Module
    parent: str
    aliases: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ParamEntry:
    """One parameter object.

    Attributes:
        key: its first FQN.
        param: the object.
        aliases: its further FQNs.
        holders: canonical FQNs of the modules that register it, in pre-order.
    """

    key: str
    param: nn.Parameter
    aliases: list[str] = field(default_factory=list)
    holders: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class BufferEntry:
    """One buffer object.

    Attributes:
        name: its first FQN.
        buffer: the object.
        persistent: it is part of the state dict.
    """

    name: str
    buffer: torch.Tensor
    persistent: bool


class ModuleTree:
    """A model's tree, walked once.

    Attributes:
        modules: by canonical FQN, in pre-order; the first is the root.
        params: by key, in the order of ``named_parameters``.
        buffers: by name, in the order of ``named_buffers``.
        fqn_of: canonical FQN by ``id`` of the module.
        key_of: key by ``id`` of the parameter.
        methods: (module, method) pairs that run a module as its hooked forward does.
    """

    def __init__(self, model: nn.Module, methods: Sequence[tuple[str, str]] = ()) -> None:
        self.modules: dict[str, ModuleEntry] = {}
        self.params: dict[str, ParamEntry] = {}
        self.buffers: dict[str, BufferEntry] = {}
        self.fqn_of: dict[int, str] = {}
        self.key_of: dict[int, str] = {}
        self._buffer_name: dict[int, str] = {}
        for path, module, parent in _paths(model, "", "", ()):
            self._add(path, module, parent)
        paths = dict(model.named_modules(remove_duplicate=False)) if methods else {}
        self.methods = tuple((self.fqn_of[id(paths[path])], name) for path, name in methods)

    def module(self, fqn: str) -> nn.Module:
        """The module with that canonical FQN."""
        return self.modules[fqn].module

    def keys_on(self, module: nn.Module) -> list[str]:
        """Keys of the parameters registered on a module of the tree."""
        return self.modules[self.fqn_of[id(module)]].params

    def _add(self, path: str, module: nn.Module, parent_path: str) -> None:
        fqn = self.fqn_of.get(id(module))
        is_new = fqn is None
        if fqn is None:
            fqn = self.fqn_of[id(module)] = path
            self.modules[fqn] = ModuleEntry(fqn=fqn, module=module, parent=parent_path)
        else:
            self.modules[fqn].aliases.append(path)
        if path and parent_path in self.modules and fqn not in self.modules[parent_path].children:
            self.modules[parent_path].children.append(fqn)
        entry = self.modules[fqn]
        for name, param in module._parameters.items():
            if param is not None:
                self._add_param(entry, _join(path, name), param, is_new)
        for name, buffer in module._buffers.items():
            if buffer is not None and is_new:
                self._add_buffer(entry, _join(path, name), name, buffer)

    def _add_param(self, entry: ModuleEntry, path: str, param: nn.Parameter, is_new: bool) -> None:
        key = self.key_of.get(id(param))
        if key is None:
            key = self.key_of[id(param)] = path
            self.params[key] = ParamEntry(key=key, param=param)
        else:
            self.params[key].aliases.append(path)
        if is_new:
            if key not in entry.params:
                entry.params.append(key)
            if entry.fqn not in self.params[key].holders:
                self.params[key].holders.append(entry.fqn)

    def _add_buffer(self, entry: ModuleEntry, path: str, name: str, buffer: torch.Tensor) -> None:
        known = self._buffer_name.get(id(buffer))
        if known is None:
            known = self._buffer_name[id(buffer)] = path
            persistent = name not in entry.module._non_persistent_buffers_set
            self.buffers[path] = BufferEntry(name=path, buffer=buffer, persistent=persistent)
        if known not in entry.buffers:
            entry.buffers.append(known)


def has_forward(module: nn.Module) -> bool:
    """The class of the module defines a forward."""
    for cls in type(module).__mro__:
        if "forward" in vars(cls):
            return cls is not nn.Module
    return False


def is_lazy(module: nn.Module) -> bool:
    """The module has parameters whose shape is not known yet."""
    if not isinstance(module, LazyModuleMixin):
        return False
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in tensors)


def static_traits(module: nn.Module) -> set[str]:
    """The traits of a module that its class and attributes tell."""
    traits = set()
    if isinstance(module, torch.jit.ScriptModule):
        traits.add("script")
    if is_lazy(module):
        traits.add("lazy")
    if isinstance(module, _BatchNorm):
        traits.add("batch-statistics")
    if isinstance(module, nn.MultiheadAttention):
        traits.add("multihead")
    rate = getattr(module, "p", 0) if isinstance(module, _DropoutNd) else 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        rate = module.dropout
    if rate:
        traits.add("dropout")
    return traits


def is_dtensor(tensor: torch.Tensor) -> bool:
    """The tensor is sharded over devices (asked without importing DTensor)."""
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype without the ``torch.``."""
    return str(dtype).removeprefix("torch.")


def buffer_infos(tree: ModuleTree) -> tuple[BufferInfo, ...]:
    """The buffers as the IR lists them."""
    return tuple(
        BufferInfo(
            name=entry.name,
            shape=tuple(entry.buffer.shape),
            dtype=dtype_name(entry.buffer.dtype),
            nbytes=entry.buffer.numel() * entry.buffer.element_size(),
            persistent=entry.persistent,
        )
        for entry in tree.buffers.values()
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _paths(module: nn.Module, path: str, parent: str, above: tuple[int, ...]) -> Iterator[tuple[str, nn.Module, str]]:
    """Every path in pre-order; a module that contains itself is not entered again."""
    yield path, module, parent
    for name, child in module._modules.items():
        if child is not None and id(child) not in above:
            yield from _paths(child, _join(path, name), path, (*above, id(module)))
