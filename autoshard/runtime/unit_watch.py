"""What FSDP2 does with each unit during a step: gathered, hooked, reduced, in which order.

The parameter groups of FSDP2 are watched by replacing methods on the group objects, so that nothing has to be undone
when the objects go. This reads private state of torch, as ``confirm`` does: no public interface tells any of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from autoshard.capture.spans import FAILED
from autoshard.plan import Decisions


class UnitRecord:
    """One unit during a step.

    Attributes:
        modules: FQNs of its modules.
        keys: keys of its parameters.
        trains: some of them require gradients.
        num_forwards: how often a forward of one of its modules began.
        pre_backward_at: place of its first pre-backward among those of all units; ``None`` without one.
        is_late: its post-backward came only at the end of the whole backward.
        sparse: keys of its parameters whose gradient was sparse.
    """

    def __init__(self, modules: tuple[str, ...], groups: list[Any], key_of: dict[nn.Parameter, str]) -> None:
        self.modules = modules
        self._groups = groups
        self._params = {key_of[param.sharded_param]: param for group in groups for param in group.fsdp_params}
        self.keys = tuple(self._params)
        self.trains = any(param.sharded_param.requires_grad for param in self._params.values())
        self.num_forwards = 0
        self.pre_backward_at: int | None = None
        self.is_late = False
        self.sparse: set[str] = set()

    def note_sparse(self) -> None:
        """Look for sparse gradients before they are reduced; on fake tensors no reduction refuses them."""
        for key, param in self._params.items():
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None and whole.grad is not None and whole.grad.layout is not torch.strided:
                self.sparse.add(key)

    @property
    def name(self) -> str:
        """The unit as people read it."""
        return unit_name(self.modules)

    @property
    def is_sharded(self) -> bool:
        """All of its parameters are sharded now."""
        return all(group.is_sharded for group in self._groups)

    @property
    def num_unsharded_bytes(self) -> int:
        """Bytes of its parameters as they are gathered, without padding."""
        return sum(_gathered_bytes(param) for param in self._params.values())

    def contains(self, other: "UnitRecord") -> bool:
        """A module of the other unit stands inside a module of this one, by their paths."""
        outer = [fqn.split(".") if fqn else [] for fqn in self.modules]
        return any(fqn.split(".")[: len(path)] == path for fqn in other.modules for path in outer)

    def key_at(self, storage: int) -> str | None:
        """Key of the parameter whose unsharded values live in a storage, by the storage's address."""
        for key, param in self._params.items():
            if any(part.untyped_storage()._cdata == storage for part in param.all_gather_outputs):
                return key
        return None

    def key_of(self, tensor: torch.Tensor) -> str | None:
        """Key of the parameter of which a tensor is the sharded form."""
        return next((key for key, param in self._params.items() if param.sharded_param is tensor), None)


class UnitWatch:
    """The records of all units of a sharded model, filled in while a step runs.

    Args:
        model: sharded by ``plan``.
        plan: its units.
        tell: told the unit's name and what happens to it, at each event.
    """

    def __init__(
        self, model: nn.Module, plan: Decisions, tell: Callable[[str, str], None] = lambda unit, event: None
    ) -> None:
        key_of = {param: key for key, param in model.named_parameters()}
        self._tell = tell
        self._num_pre_backwards = 0
        self._is_final = False
        self._num_moving = 0
        self.units: list[UnitRecord] = []
        for unit in plan.units:
            module = model.get_submodule(unit.modules[0])
            assert isinstance(module, FSDPModule)
            state = module._get_fsdp_state()
            record = UnitRecord(unit.modules, state._fsdp_param_groups, key_of)
            self.units.append(record)
            self._watch_final(state)
            for group in state._fsdp_param_groups:
                self._watch_group(group, record)

    @property
    def num_pre_backwards(self) -> int:
        """First pre-backwards of units so far."""
        return self._num_pre_backwards

    @property
    def is_moving(self) -> bool:
        """FSDP2 itself is at work on unsharded values."""
        return self._num_moving > 0

    def find(self, tensor: torch.Tensor) -> tuple[UnitRecord, str] | None:
        """The unit and the parameter whose unsharded values a tensor looks at."""
        address = tensor.untyped_storage()._cdata
        for unit in self.units:
            key = unit.key_at(address)
            if key is not None:
                return unit, key
        return None

    def owner(self, tensor: torch.Tensor) -> tuple[UnitRecord, str] | None:
        """The unit and the parameter of which a tensor is the sharded form."""
        found = ((unit, unit.key_of(tensor)) for unit in self.units)
        return next(((unit, key) for unit, key in found if key is not None), None)

    def _watch_group(self, group: Any, record: UnitRecord) -> None:
        pre_forward, pre_backward, post_backward = group.pre_forward, group.pre_backward, group.post_backward

        def on_forward(*args: Any, **kwargs: Any) -> Any:
            record.num_forwards += 1
            self._tell(record.name, "forward")
            return _named(record, pre_forward, args, kwargs)

        def on_pre_backward(*args: Any, **kwargs: Any) -> Any:
            if record.pre_backward_at is None:
                record.pre_backward_at = self._num_pre_backwards
                self._num_pre_backwards += 1
            self._tell(record.name, "backward")
            return _named(record, pre_backward, args, kwargs)

        def on_post_backward(*args: Any, **kwargs: Any) -> Any:
            record.is_late = self._is_final
            record.note_sparse()
            self._tell(record.name, "reduction")
            return _named(record, post_backward, args, kwargs)

        group.pre_forward, group.pre_backward, group.post_backward = on_forward, on_pre_backward, on_post_backward
        group.unshard, group.wait_for_unshard = self._moving(group.unshard), self._moving(group.wait_for_unshard)

    def _moving(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def moving(*args: Any, **kwargs: Any) -> Any:
            self._num_moving += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._num_moving -= 1

        return moving

    def _watch_final(self, state: Any) -> None:
        final = state._root_post_backward_final_callback

        def on_final() -> None:
            self._is_final = True
            try:
                final()
            finally:
                self._is_final = False

        state._root_post_backward_final_callback = on_final


def unit_name(modules: tuple[str, ...]) -> str:
    """A unit as people read it."""
    return ", ".join(fqn or "(root)" for fqn in modules)


def _gathered_bytes(param: Any) -> int:
    size = param._orig_size.numel()
    dtype = param.param_dtype or param.orig_dtype
    return int(size * dtype.itemsize)


def _named(record: UnitRecord, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call, and write the unit on the error that comes out."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        if not hasattr(error, FAILED):
            setattr(error, FAILED, record.modules[0])
        raise
