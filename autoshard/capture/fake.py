"""A model's tensors swapped for fake ones while a step is traced, and everything put back afterwards.

Fake tensors have shapes, dtypes, strides and storages with sizes, but no data. All of them claim the device ``cpu``,
whatever the target is: fake tensors of another device abort the process on a build of torch without that device. What
depends on the device (attention kernels) is corrected elsewhere.

The model is left exactly as it was: each module's attributes, and the contents of the lists, dicts and sets among
them, are noted before the trace and restored after it, also when the trace fails; what it keeps elsewhere is looked
after by ``surroundings``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autoshard.capture.aliases import Alias, find_aliases
from autoshard.capture.surroundings import Surroundings
from autoshard.capture.tree import ModuleTree

CPU = torch.device("cpu")
MAX_CONTAINER_DEPTH = 4


class FakeMode(FakeTensorMode):
    """The fake tensor mode of a trace, which takes real constants.

    torch wraps the dispatch of its modes so that ``torch.compile`` leaves them alone. Compilation is off while a step
    is traced, and the wrapper is entered for each of tens of thousands of ops, so it is left out.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    __torch_dispatch__ = getattr(FakeTensorMode.__torch_dispatch__, "__wrapped__", FakeTensorMode.__torch_dispatch__)


def fake_tensor(mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> FakeTensor:
    """A fake cpu tensor of the same layout; floating point ones get ``dtype`` if it is given."""
    is_cast = dtype is not None and tensor.is_floating_point()
    if tensor.layout is torch.strided:
        meta = torch.empty_strided(
            tuple(tensor.shape), tensor.stride(), dtype=dtype if is_cast else tensor.dtype, device="meta"
        )
    else:
        meta = tensor.detach().to("meta")
    return FakeTensor(mode, meta, CPU)


class FakeModel:
    """Context in which a model's parameters, buffers and tensor attributes are fake.

    Attributes:
        params: the fake twin of each parameter, by key.
        buffers: the fake twins of buffers and of tensor attributes, each with its original.
        aliases: second references to parameters that do not follow when ``fully_shard`` replaces the registered one,
            each with the tensor that stands for it now: a twin of its own, or the original where that cannot be put.

    Args:
        tree: the model's tree.
        mode: the mode of the twins.
        dtype: of the twins of floating point parameters, ``None`` for their own.
        keeps_aliases: second references are parameters' twins as well, so that a model can be sharded in this context.
    """

    def __init__(
        self, tree: ModuleTree, mode: FakeTensorMode, dtype: torch.dtype | None, *, keeps_aliases: bool = False
    ) -> None:
        self._tree, self._mode, self._dtype, self._keeps_aliases = tree, mode, dtype, keeps_aliases
        self.aliases: list[tuple[Alias, torch.Tensor]] = []
        self._twins: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []  # keeps the ids in _twins valid
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._entries: list[tuple[Any, str, torch.Tensor]] = []
        self._grads: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self.params: dict[str, nn.Parameter] = {}
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> "FakeModel":
        modules = [entry.module for entry in self._tree.modules.values()]
        self._surroundings = Surroundings(modules)
        for module in modules:
            self._attributes.append((module, dict(module.__dict__)))
            for value in module.__dict__.values():
                self._note_contents(value, 0)
        try:
            for key, entry in self._tree.params.items():
                # A closure over a real parameter escapes the swap, and the backward would leave a gradient on it.
                self._grads.append((entry.param, entry.param.grad))
                twin = self.params[key] = self._param_twin(entry.param)
                self._remember(entry.param, twin)
            for module in modules:
                self._swap_params(module)
            if not self._keeps_aliases:
                for alias in find_aliases(self._tree):
                    self._separate(alias)
            for module in modules:
                self._swap(module)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note_contents(self, value: Any, depth: int) -> None:
        """Remember what a container holds, so that it can be filled again as it was."""
        if not isinstance(value, list | dict | set) or id(value) in self._contents or depth > MAX_CONTAINER_DEPTH:
            return
        self._contents[id(value)] = (value, value.copy())
        if not isinstance(value, set):
            for part in value.values() if isinstance(value, dict) else value:
                self._note_contents(part, depth + 1)

    def _restore(self) -> None:
        for param, grad in self._grads:
            param.grad = grad
        for group, name, tensor in self._entries:  # a ScriptModule's groups are no dicts and live elsewhere
            group[name] = tensor
        for module, attributes in self._attributes:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for container, contents in self._contents.values():
            if _is_as_noted(container, contents):  # nothing to do, and some containers refuse to be changed
                continue
            container.clear()
            if isinstance(container, list):
                container.extend(contents)
            else:
                container.update(contents)
        for alias, _ in self.aliases:
            if alias.slot is not None:
                alias.slot.put(alias.tensor)
        self._surroundings.restore()

    def _param_twin(self, param: torch.Tensor) -> nn.Parameter:
        twin = nn.Parameter(fake_tensor(self._mode, param, self._dtype), requires_grad=param.requires_grad)
        twin.__dict__.update(param.__dict__)
        return twin

    def _remember(self, original: torch.Tensor, twin: torch.Tensor) -> None:
        self._twins[id(original)] = twin
        self._originals.append(original)

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode:
            return tensor
        twin = self._twins.get(id(tensor))
        if twin is None:
            twin = fake_tensor(self._mode, tensor)
            self._remember(tensor, twin)
            self.buffers.append((twin, tensor))
        return twin

    def _separate(self, alias: Alias) -> None:
        """Put a twin of its own in the place of a second reference, so that an op on it can be told."""
        if alias.slot is None:
            self.aliases.append((alias, self._twin(alias.tensor) if not alias.is_param else alias.tensor))
            return
        twin = self._param_twin(alias.tensor)
        self.aliases.append((alias, twin))
        alias.slot.put(twin)

    def _swap_params(self, module: nn.Module) -> None:
        """As FSDP2 does it: through the module's own ``__setattr__`` where its class has one."""
        follows = type(module).__setattr__ is not nn.Module.__setattr__ and not isinstance(
            module, torch.jit.ScriptModule
        )
        for name, param in list(module._parameters.items()):
            if param is not None:
                self._entries.append((module._parameters, name, param))
                twin: Any = self._twins[id(param)]
                if follows:
                    setattr(module, name, twin)
                else:
                    module._parameters[name] = twin

    def _swap(self, module: nn.Module) -> None:
        for name, tensor in module._buffers.items():
            if tensor is not None:
                self._entries.append((module._buffers, name, tensor))
                module._buffers[name] = self._twin(tensor)
        for name, value in list(module.__dict__.items()):
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            if any(isinstance(part, torch.Tensor) for part in _parts(value)):
                module.__dict__[name] = self._swapped(value)

    def _swapped(self, value: Any) -> Any:
        """``value`` with the tensors directly in it exchanged: a new container, the original is not touched."""
        if isinstance(value, torch.Tensor):
            return self._twin(value)
        if isinstance(value, dict):
            return type(value)((key, self._swapped(part)) for key, part in value.items())
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self._swapped(part) for part in value)
        return value


def _is_as_noted(container: Any, contents: Any) -> bool:
    """Whether a container holds the very objects that its copy does, in the same order."""
    if len(container) != len(contents):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), contents.items(), strict=True)
        return all(key is old_key and value is old for (key, value), (old_key, old) in pairs)
    if isinstance(container, set):
        return bool(container == contents)
    return all(value is old for value, old in zip(container, contents, strict=True))


def _parts(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        yield from value
    elif type(value) is dict:
        yield from value.values()
    else:
        yield value
