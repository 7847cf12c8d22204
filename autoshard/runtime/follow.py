"""What ``fully_shard`` leaves behind on the parameters that it replaces, brought over to the new ones.

A parameter may carry more than values: attributes that optimizers and initialisations look for, hooks, and second
references in lists, dictionaries and objects. ``fully_shard`` registers a new parameter and drops all of it.

* Attributes and post-accumulate hooks go to the sharded parameter. Such a hook then runs once the reduced gradient is
  there, on the shard.
* Gradient hooks go to the unsharded parameter, which exists while a forward of its unit runs. There a hook sees what it
  would see in one process, the whole gradient of this rank's batch, and what it returns is what is reduced.
* Second references are exchanged where their holder can be changed and the parameter is trained.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.capture.aliases import Alias, find_aliases
from autoshard.capture.tree import ModuleTree
from autoshard.plan import Decisions

Hook = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What one parameter carries.

    Attributes:
        key: of the parameter.
        attributes: its own ``__dict__``.
        grad_hooks: of ``register_hook``, in their order.
        accumulated_hooks: of ``register_post_accumulate_grad_hook``, in their order.
    """

    key: str
    attributes: dict[str, Any]
    grad_hooks: tuple[Hook, ...]
    accumulated_hooks: tuple[Hook, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Belongings:
    """What is to be brought over.

    Attributes:
        carried: for each unit, what its parameters carry; those without anything are left out.
        aliases: second references that can be exchanged.
    """

    carried: tuple[tuple[Carried, ...], ...]
    aliases: tuple[Alias, ...]


def belongings(model: nn.Module, owned: Sequence[dict[str, nn.Parameter]]) -> Belongings:
    """What the parameters carry before they are sharded.

    Args:
        model: not sharded yet.
        owned: the parameters of each unit, by key.
    """
    sharded = {key for params in owned for key, param in params.items() if param.requires_grad}
    return Belongings(
        carried=tuple(
            tuple(
                found
                for key, param in params.items()
                if (found := _carried(key, param)).attributes or found.grad_hooks or found.accumulated_hooks
            )
            for params in owned
        ),
        aliases=tuple(
            alias
            for alias in find_aliases(ModuleTree(model))
            if alias.is_param and alias.slot is not None and alias.key in sharded
        ),
    )


def _carried(key: str, param: nn.Parameter) -> Carried:
    return Carried(
        key=key,
        attributes=dict(vars(param)),
        grad_hooks=tuple((param._backward_hooks or {}).values()),
        accumulated_hooks=tuple((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()),
    )


def follow(model: nn.Module, plan: Decisions, found: Belongings, methods: Sequence[tuple[str, str]]) -> None:
    """Bring everything over to the sharded parameters; called before methods are registered.

    Args:
        model: sharded.
        plan: its plan.
        found: what was there before.
        methods: (module, method) pairs that will be registered beside forward.
    """
    for alias in found.aliases:
        if alias.slot is not None and alias.slot.get() is alias.tensor:  # else its holder has renewed it
            alias.slot.put(model.get_parameter(alias.key))
    for unit, carried in zip(plan.units, found.carried, strict=True):
        for each in carried:
            _dress(model.get_parameter(each.key), each)
        hooked = tuple(each for each in carried if each.attributes or each.grad_hooks)
        for fqn in unit.modules if hooked else ():
            module = model.get_submodule(fqn)
            dress = functools.partial(_dress_unsharded, model, hooked)
            # FSDP2's own hook stands first: when this one runs, the registered parameters are the unsharded ones.
            module.register_forward_pre_hook(lambda *_, dress=dress: dress())
            for name in (name for owner, name in methods if owner == fqn):
                setattr(module, name, _before(dress, getattr(module, name)))


def _dress(param: torch.Tensor, carried: Carried) -> None:
    for name, value in carried.attributes.items():
        if name not in vars(param):
            setattr(param, name, value)
    for hook in carried.accumulated_hooks:
        param.register_post_accumulate_grad_hook(hook)


def _dress_unsharded(model: nn.Module, carried: Sequence[Carried]) -> None:
    """Give the unsharded parameters what they should carry, once each."""
    for each in carried:
        param = model.get_parameter(each.key)
        if _DRESSED in vars(param):
            continue
        setattr(param, _DRESSED, True)
        for name, value in each.attributes.items():
            if name not in vars(param):
                setattr(param, name, value)
        for hook in each.grad_hooks:
            param.register_hook(hook)


_DRESSED = "_autoshard_dressed"


def _before(action: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        action()
        return method(*args, **kwargs)

    return called
