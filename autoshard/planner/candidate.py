"""A candidate: what the search moves, and how it becomes the decisions that a plan states.

A candidate names units by their modules and which of them stay unsharded after forward; the decisions add everything
that follows from that (order of application, who owns what, precision, what the space has already forced).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.analysis.ownership import application_order, owners, unit_digest
from autoshard.analysis.space import LegalSpace
from autoshard.ir import ModelGraph
from autoshard.plan.schema import Axis, Decisions, Method, Precision, Unit
from autoshard.request import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice of units.

    Attributes:
        units: modules of each unit in execution order, the root left out; sorted.
        kept: the units that stay unsharded from forward to backward (reshard false).
        recompute: modules that compute their activations again in backward, in execution order.
        root_reshards: the root reshards after forward.
    """

    units: tuple[tuple[str, ...], ...]
    kept: frozenset[tuple[str, ...]] = frozenset()
    recompute: tuple[str, ...] = ()
    root_reshards: bool = False


def candidate(
    units: Iterable[tuple[str, ...]],
    kept: Iterable[tuple[str, ...]] = (),
    recompute: tuple[str, ...] = (),
    root_reshards: bool = False,
) -> Candidate:
    """The candidate in canonical form: sorted, each unit once, ``kept`` only of its own units."""
    distinct = tuple(sorted(set(units)))
    return Candidate(
        units=distinct,
        kept=frozenset(kept) & frozenset(distinct),
        recompute=recompute,
        root_reshards=root_reshards,
    )


def decide(graph: ModelGraph, space: LegalSpace, question: Question, chosen: Candidate) -> Decisions:
    """All that ``apply_plan`` will do for a candidate.

    The root keeps its parameters unless the request says ``reshard=always`` or the candidate asks for it: they are
    needed first in backward, so resharding them gathers them twice in a row.
    """
    order = application_order(graph, (*chosen.units, ("",)))
    owned = owners(graph, order, space.replicated)
    sizes = {param.key: param.nbytes for param in graph.params}
    units = []
    for modules, keys in zip(order, owned, strict=True):
        dims = {key: space.shard_dims[key] for key in sorted(keys) if key in space.shard_dims}
        units.append(
            Unit(
                modules=modules,
                reshard=not set(keys).isdisjoint(space.must_reshard) or _reshards(space, question, chosen, modules),
                num_params=len(keys),
                num_bytes=sum(sizes[key] for key in keys),
                digest=unit_digest(keys),
                shard_dims=dims,
            )
        )
    axes = [Axis(name="shard", size=question.num_shards, role="shard")]
    if question.num_replicas > 1:
        axes.insert(0, Axis(name="replicate", size=question.num_replicas, role="replicate"))
    return Decisions(
        entry=graph.entry,
        mesh=tuple(axes),
        precision=Precision(param=question.param_dtype, reduce=question.reduce_dtype),
        units=tuple(units),
        recompute=chosen.recompute,
        methods=tuple(Method(module=fqn, method=name) for fqn, name in space.methods if any(fqn in u for u in order)),
        replicated=space.replicated,
        reduce_unused=space.reduce_unused,
        rebuilt_buffers=space.rebuilt_buffers,
        micro_batches=question.micro_batches,
        gradient_sync=question.gradient_sync,
    )


def _reshards(space: LegalSpace, question: Question, chosen: Candidate, modules: tuple[str, ...]) -> bool:
    if modules == ("",):
        return (question.reshard == "always" or chosen.root_reshards) and not space.root_must_keep
    if question.reshard == "auto":
        return modules not in chosen.kept
    return question.reshard == "always"
