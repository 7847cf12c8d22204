"""Modules and parameters as the IR lists them: what their objects tell, joined with what a trace found."""

from itertools import combinations

import torch
from torch import nn

from autoshard.capture.tree import ModuleTree, dtype_name, has_forward, is_dtensor, static_traits
from autoshard.ir import ModuleNode, ParamInfo


def module_nodes(
    tree: ModuleTree,
    digests: dict[str, str],
    num_calls: dict[str, int],
    traits: dict[str, set[str]] | None = None,
) -> tuple[ModuleNode, ...]:
    """The modules as the IR lists them.

    Args:
        tree: the model's tree.
        digests: of each module's structure, by FQN.
        num_calls: hooked forwards by FQN.
        traits: traits that a trace found, by FQN, beside those that the classes tell.
    """
    run_by_method = {fqn for fqn, _ in tree.methods}
    return tuple(
        ModuleNode(
            fqn=fqn,
            aliases=tuple(entry.aliases),
            class_name=f"{type(entry.module).__module__}.{type(entry.module).__qualname__}",
            parent=entry.parent,
            children=tuple(entry.children),
            own_params=tuple(entry.params),
            own_buffers=tuple(entry.buffers),
            has_forward=has_forward(entry.module) or fqn in run_by_method,
            num_calls=num_calls.get(fqn, 0),
            repeat_class=digests[fqn],
            traits=tuple(sorted(static_traits(entry.module) | (traits or {}).get(fqn, set()))),
        )
        for fqn, entry in tree.modules.items()
    )


def param_infos(
    tree: ModuleTree,
    *,
    readers: dict[str, tuple[tuple[str, ...], ...]],
    trained: frozenset[str],
    traits: dict[str, frozenset[str]] | None = None,
    kept_in: dict[str, tuple[str, ...]] | None = None,
) -> tuple[ParamInfo, ...]:
    """The parameters as the IR lists them.

    Args:
        tree: the model's tree.
        readers: stacks by key.
        trained: keys of those that get a gradient.
        traits: keys by trait that a trace found, beside what the parameter itself tells.
        kept_in: places of second references, by key.
    """
    found = {
        "dtensor": {key for key, entry in tree.params.items() if is_dtensor(entry.param)},
        "complex": {key for key, entry in tree.params.items() if entry.param.is_complex()},
        "sparse-grad": _sparse_tables(tree),
        "grad-hook": {key for key, entry in tree.params.items() if entry.param._backward_hooks},
        "accumulated-hook": {
            key for key, entry in tree.params.items() if getattr(entry.param, "_post_accumulate_grad_hooks", None)
        },
        "shares-storage": _sharing(tree),
        "written-in-forward": set(),
        "read-by-alias": set(),
        "conditional": set(),
    }
    for trait, keys in (traits or {}).items():
        found[trait] |= keys
    return tuple(
        ParamInfo(
            key=key,
            aliases=tuple(entry.aliases),
            shape=tuple(entry.param.shape),
            dtype=dtype_name(entry.param.dtype),
            nbytes=entry.param.numel() * entry.param.element_size(),
            requires_grad=entry.param.requires_grad,
            contiguous=entry.param.is_contiguous(),
            holders=tuple(entry.holders),
            readers=readers.get(key, ()),
            gets_grad=key in trained,
            traits=tuple(sorted(trait for trait, keys in found.items() if key in keys)),
            kept_in=(kept_in or {}).get(key, ()),
        )
        for key, entry in tree.params.items()
    )


def _sparse_tables(tree: ModuleTree) -> set[str]:
    """Keys of the tables whose gradient is sparse."""
    return {
        tree.key_of[id(entry.module.weight)]
        for entry in tree.modules.values()
        if isinstance(entry.module, nn.Embedding | nn.EmbeddingBag)
        and entry.module.sparse
        and id(entry.module.weight) in tree.key_of
    }


def _sharing(tree: ModuleTree) -> set[str]:
    """Keys of the parameters of which some bytes belong to another one too, one of the two being trained."""
    storages: dict[int, list[tuple[str, int, int]]] = {}
    for key, entry in tree.params.items():
        param = entry.param
        if not is_dtensor(param) and param.layout is torch.strided and param.numel():
            first = int(param.storage_offset()) * param.element_size()
            last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            place = (key, first, first + (int(last) + 1) * param.element_size())
            storages.setdefault(param.untyped_storage()._cdata, []).append(place)
    found: set[str] = set()
    for places in storages.values():
        for (key, first, end), (other, start, stop) in combinations(places, 2):
            if first < stop and start < end and any(tree.params[one].param.requires_grad for one in (key, other)):
                found |= {key, other}
    return found
