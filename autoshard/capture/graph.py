"""``capture``: a model and example inputs in, a ``ModelGraph`` out.

Where the model takes different paths, each pair of inputs is traced. The ops and storages are those of the first
pair; readers, gradients and traits are united over the pairs and the number of calls is the greatest, since those are
what legality asks for.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch
from torch import nn

from autoshard.capture.exact_type import TRAIT as EXACT_TYPE
from autoshard.capture.exact_type import exact_types
from autoshard.capture.inputs import Pair, input_infos, read_pairs
from autoshard.capture.nodes import module_nodes, param_infos
from autoshard.capture.outline import Outlines
from autoshard.capture.paths import united_spans
from autoshard.capture.probe import BY_CHANCE, Uncertain, uncertain
from autoshard.capture.refusals import NotAsOutlined, NotInOutline
from autoshard.capture.step import Traced, trace_step
from autoshard.capture.structure import repeat_classes
from autoshard.capture.tree import (
    ModuleTree,
    buffer_infos,
    dtype_name,
    is_dtensor,
    is_lazy,
)
from autoshard.errors import CaptureError, Diagnostic, RequestError
from autoshard.ir import CALLER, ModelGraph, ModuleNode, Moment, ParamInfo, Region, StorageInfo

COMPUTE_DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
"""Dtypes that a step can be traced in; ``float32`` leaves everything as it is stored."""

SHOWN = 5
"""Names that a diagnostic lists before it says how many more there are."""


def capture(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    entry: str = "forward",
    compute_dtype: str = "float32",
    device_kind: str = "cpu",
    outline: bool = True,
    methods: Sequence[tuple[str, str]] = (),
) -> ModelGraph:
    """Run one training step of a model on fake tensors and describe it.

    The model may be real or on the meta device; nothing is computed with its values and it is left exactly as it was.

    Args:
        model: the root module.
        inputs: ``(args, kwargs)``, a list of such pairs where the model takes different paths, or a function that
            returns either.
        loss: function of the outputs that gives one scalar; ``None`` looks for one.
        entry: name of the root's method that runs the step.
        compute_dtype: dtype of floating point parameters and inputs; ``float32`` means as stored.
        device_kind: kind of the device that the step is for, ``cuda`` or ``cpu``.
        outline: trace blocks that are alike once; what comes out is the same.
        methods: (module, method) pairs; each method runs its module as a hooked forward does.

    Raises:
        RequestError: an argument is not a question that can be asked.
        CaptureError: the step fails.
    """
    if compute_dtype not in COMPUTE_DTYPES:
        raise RequestError("compute_dtype", compute_dtype, "one of " + ", ".join(COMPUTE_DTYPES))
    if device_kind not in ("cuda", "cpu"):
        raise RequestError("device_kind", device_kind, "cuda or cpu")
    tree = read_tree(model, entry, methods)
    _require_whole_params(tree)
    pairs = read_pairs(inputs)
    digests = repeat_classes(tree)
    outlines = Outlines(tree, digests) if outline and not methods else None
    diagnostics: list[Diagnostic] = []
    traced = []
    dtype = COMPUTE_DTYPES[compute_dtype]
    for pair in pairs:
        one, dtype = _trace(model, tree, pair, loss, entry, dtype, device_kind, diagnostics, outlines)
        traced.append(one)
    if dtype is None and COMPUTE_DTYPES[compute_dtype] is not None and len(traced) > 1:
        # A later pair needed the stored dtypes: all pairs are traced alike.
        traced = [_trace(model, tree, pair, loss, entry, None, device_kind, [], outlines)[0] for pair in pairs]
    doubts = [
        uncertain(
            model,
            tree,
            pair,
            one.way,
            one.asked,
            len(one.region.forward),
            entry=entry,
            dtype=dtype,
            device_kind=device_kind,
            alike=None if outlines is None else outlines.alike,
        )
        for pair, one in zip(pairs, traced, strict=True)
    ]
    exact = exact_types(
        model,
        tree,
        pairs[0],
        len(traced[0].region.forward),
        entry=entry,
        dtype=dtype,
        device_kind=device_kind,
    )
    diagnostics += _assumptions(traced)
    diagnostics += _paths(traced, tree)
    diagnostics += _chances(traced, doubts)
    diagnostics += _left_over(traced)
    return ModelGraph(
        frontend="trace",
        entry=entry,
        loss=traced[0].loss,
        compute_dtype="float32" if dtype is None else compute_dtype,
        inputs=input_infos(pairs[0]),
        modules=_modules(tree, digests, traced, doubts, exact),
        params=_params(tree, traced, doubts),
        buffers=buffer_infos(tree),
        regions=(_united(traced, tree),),
        diagnostics=tuple(diagnostics),
        outlines=() if outlines is None else outlines.described(),
    )


def read_tree(model: nn.Module, entry: str, methods: Sequence[tuple[str, str]] = ()) -> ModuleTree:
    """The tree of a model that can be captured.

    Raises:
        RequestError: ``model`` is no module, or has no such method.
        CaptureError: a module does not know its shapes yet.
    """
    if not isinstance(model, nn.Module):
        raise RequestError(
            "model", type(model).__name__, "a torch.nn.Module", "give the module itself, not its class or its output"
        )
    if not callable(getattr(model, entry, None)):
        raise RequestError(
            "entry",
            entry,
            f"the name of a method of {type(model).__name__}",
            "name the method that runs one training step, or none for forward",
        )
    tree = ModuleTree(model, methods)
    try:
        TopologicalSorter({fqn: module.children for fqn, module in tree.modules.items()}).prepare()
    except CycleError as error:
        raise CaptureError(
            error.args[1][0] or "(root)",
            "the module is registered inside itself",
            "keep such a reference out of the module tree",
        ) from None
    for fqn, module in tree.modules.items():
        if is_lazy(module.module):
            raise CaptureError(
                fqn or "(root)",
                f"{type(module.module).__name__} does not know the shapes of its parameters yet",
                "run one forward on a small batch before planning, or give the sizes when constructing it",
            )
    return tree


def _require_whole_params(tree: ModuleTree) -> None:
    for key, entry in tree.params.items():
        if is_dtensor(entry.param):
            raise CaptureError(
                entry.holders[0] or "(root)",
                f"its parameter {key} is a DTensor, sharded by another scheme already",
                "plan before anything is sharded; tensor, expert or pipeline parallelism below a plan is not supported",
            )


def _trace(
    model: nn.Module,
    tree: ModuleTree,
    pair: Pair,
    loss: Callable[[Any], Any] | None,
    entry: str,
    dtype: torch.dtype | None,
    device_kind: str,
    diagnostics: list[Diagnostic],
    outlines: Outlines | None,
) -> tuple[Traced, torch.dtype | None]:
    """One step in ``dtype``, or in the stored dtypes if the model does not run in ``dtype``."""
    options: dict[str, Any] = {"loss": loss, "entry": entry, "device_kind": device_kind, "outlines": outlines}
    try:
        return _step(model, tree, pair, dtype=dtype, **options), dtype
    except CaptureError as error:
        if dtype is None or not _is_about_dtypes(error.reason):
            raise
        traced = _step(model, tree, pair, dtype=None, **options)
        why = str(error.__cause__)  # without the line in the user's file: no path belongs into a plan
        diagnostics.append(
            Diagnostic(
                code="AS101",
                severity="warning",
                where=error.fqn,
                message=f"the step does not run with parameters cast to {dtype_name(dtype)} ({why}); it was "
                "captured in the stored dtypes, so the projected activations are too large",
                remedy="cast the buffer or activation that meets the parameter, or ask for precision fp32",
            )
        )
        return traced, None


def _step(model: nn.Module, tree: ModuleTree, pair: Pair, *, outlines: Outlines | None, **options: Any) -> Traced:
    """One step, its blocks replayed as far as they can be; what shows too late makes the trace begin again."""
    if outlines is None:
        return trace_step(model, tree, pair, **options)
    while not outlines.off_reason:
        try:
            return trace_step(model, tree, pair, outlines=outlines, **options)
        except NotAsOutlined as refusal:
            outlines.refuse(refusal.digest, refusal.reason)
        except NotInOutline as refusal:
            outlines.refuse_holders(refusal.key)
        except CaptureError:
            if not outlines.replayed:
                raise
            outlines.turn_off("the step failed, and it may have been a replay that did")
    return trace_step(model, tree, pair, **options)


def _is_about_dtypes(reason: str) -> bool:
    return any(word in reason.lower() for word in ("dtype", "scalar type", "bfloat16", "half", "float16"))


def _assumptions(traced: Iterable[Traced]) -> list[Diagnostic]:
    """One warning for each op in each module that had to be answered without data."""
    found = dict.fromkeys(assumed for one in traced for assumed in one.assumed)
    return [
        Diagnostic(
            code="AS102",
            severity="warning",
            where=module or "(root)",
            message=f"the result of {op} depends on data that a captured step does not have; assumed: {what}",
            remedy="if the assumption is far off, the projected memory and time of this module are; "
            "plan with real data-dependent sizes by passing them in as example inputs",
        )
        for module, op, what in found
    ]


def _left_over(traced: Iterable[Traced]) -> list[Diagnostic]:
    """One warning for each place outside the model that still holds tensors of a step."""
    return [
        Diagnostic(
            code="AS122",
            severity="warning",
            where=place,
            message="keeps tensors of the captured step, which have no data, and could not be put back",
            remedy="plan in a process of its own, as the command line does, or empty it before the model runs",
        )
        for place in dict.fromkeys(place for one in traced for place in one.kept)
    ]


def _paths(traced: list[Traced], tree: ModuleTree) -> list[Diagnostic]:
    """A note on modules that only some of the inputs run, outermost ones only."""
    partial = _conditional(traced)
    outer = [fqn for fqn in tree.modules if fqn in partial and not _has_ancestor(fqn, partial, tree)]
    if not outer:
        return []
    more = f" and {len(outer) - SHOWN} more" if len(outer) > SHOWN else ""
    return [
        Diagnostic(
            code="AS103",
            severity="note",
            where=outer[0],
            message=f"only some of the {len(traced)} example inputs run {', '.join(outer[:SHOWN])}{more}; "
            "the projection is that of the first",
            remedy="list the pair of inputs with the largest step first",
        )
    ]


def _conditional(traced: list[Traced]) -> set[str]:
    """Modules that run in some traces and not in others."""
    runs: list[set[str]] = [set(one.num_calls) for one in traced]
    return runs[0].union(*runs) - runs[0].intersection(*runs)


def _has_ancestor(fqn: str, among: set[str], tree: ModuleTree) -> bool:
    while fqn:
        fqn = tree.modules[fqn].parent
        if fqn in among:
            return True
    return False


def _united(traced: list[Traced], tree: ModuleTree) -> Region:
    """The first region; what only other inputs run and train stands in it without ops.

    Module runs are put, with no length, where they would come; gradients are at the end of the backward.
    """
    region, missing = traced[0].region, set().union(*(one.trained for one in traced[1:])) - traced[0].trained
    for one in traced[1:]:
        region = replace(region, spans=united_spans(region, one.region))
    sizes = {s.param: s.nbytes for one in traced for s in one.region.storages if s.kind == "gradient"}
    end = Moment(phase="backward", index=len(region.backward) - 1)
    extra = tuple(
        StorageInfo(nbytes=sizes[key], born=end, dies=CALLER, kind="gradient", param=key)
        for key in tree.params
        if key in missing
    )
    return replace(region, storages=(*region.storages, *extra))


def _chances(traced: list[Traced], doubts: list[Uncertain]) -> list[Diagnostic]:
    """A note where Python or numpy draws random numbers and none that were tried changed what runs."""
    if not any(one.draws_in_python for one in traced) or any(
        BY_CHANCE in traits for one in doubts for traits in one.modules.values()
    ):
        return []
    return [
        Diagnostic(
            code="AS106",
            severity="note",
            where="(root)",
            message="the forward draws random numbers of Python or numpy; no others that were tried changed what runs",
            remedy="nothing, unless a rare draw skips modules: then seed all ranks alike for it",
        )
    ]


def _modules(
    tree: ModuleTree,
    digests: dict[str, str],
    traced: list[Traced],
    doubts: list[Uncertain],
    exact: frozenset[str],
) -> tuple[ModuleNode, ...]:
    traits: dict[str, set[str]] = {
        fqn: set().union(*(one.traits.get(fqn, ()) for one in traced)) for fqn in tree.modules
    }
    for fqn in _conditional(traced):
        traits[fqn].add("conditional")
    for doubt in doubts:
        for fqn, found in doubt.modules.items():
            traits[fqn] |= found
    for fqn in exact:
        traits[fqn].add(EXACT_TYPE)
    num_calls = {fqn: max(one.num_calls.get(fqn, 0) for one in traced) for fqn in tree.modules}
    return module_nodes(tree, digests, num_calls, traits)


def _params(tree: ModuleTree, traced: list[Traced], doubts: list[Uncertain]) -> tuple[ParamInfo, ...]:
    everywhere = frozenset(traced[0].trained).intersection(*(one.trained for one in traced))
    somewhere = frozenset().union(*(one.trained for one in traced)) - everywhere
    return param_infos(
        tree,
        readers={
            key: tuple(dict.fromkeys(stack for one in traced for stack in one.readers.get(key, ())))
            for key in tree.params
        },
        trained=frozenset().union(*(one.trained for one in traced)),
        traits={
            "sparse-grad": frozenset().union(*(one.sparse for one in traced)),
            "written-in-forward": frozenset().union(*(one.written for one in traced)),
            "conditional": somewhere.union(*(doubt.params for doubt in doubts)),
            "read-by-alias": frozenset().union(*(one.read_by_alias for one in traced)),
        },
        kept_in={
            key: tuple(dict.fromkeys(place for one in traced for place in _alias_places(one, key)))
            for key in tree.params
        },
    )


def _alias_places(traced: Traced, key: str) -> tuple[str, ...]:
    """Where second references to a parameter are kept, the one that was read first."""
    read = traced.read_by_alias.get(key)
    return (*((read,) if read else ()), *traced.kept_in.get(key, ()))
