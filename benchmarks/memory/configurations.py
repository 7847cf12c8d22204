"""The configurations of the table: how a model is sharded, and how its training loop runs a step."""

from dataclasses import dataclass

import msgspec

from autoshard.analysis import Analysis
from autoshard.analysis.recompute import may_recompute
from autoshard.ir import ModelGraph
from autoshard.plan import Decisions
from autoshard.planner.candidate import Candidate, candidate, decide
from autoshard.planner.cut import first_cut
from autoshard.request import Question, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How a model is sharded and trained.

    Attributes:
        name: in the table.
        request: the mesh, the precision, the optimizer and the loop.
        kept: units do not reshard after forward.
        lists: neighbouring units are put together in twos.
        recompute: all blocks that may, recompute.
        root_only: there is one unit.
        is_first: the first step is measured, not the second.
    """

    name: str
    request: Request
    kept: bool = False
    lists: bool = False
    recompute: bool = False
    root_only: bool = False
    is_first: bool = False


def _request(mesh: str = "8", precision: str = "fp32", **others: object) -> Request:
    return Request(device="cpu", mesh=mesh, precision=precision, **others)  # type: ignore[arg-type]


CONFIGURATIONS = (
    Configuration(name="shard 2, fp32", request=_request("2")),
    Configuration(name="shard 8, bf16", request=_request(precision="bf16")),
    Configuration(name="shard 64, bf16", request=_request("64", "bf16")),
    Configuration(name="kept, fp32", request=_request(), kept=True),
    Configuration(name="list units, bf16", request=_request(precision="bf16"), lists=True),
    Configuration(name="recompute, fp32", request=_request(), recompute=True),
    Configuration(name="recompute, bf16", request=_request(precision="bf16"), recompute=True),
    Configuration(name="replicas 2x4, bf16", request=_request("2x4", "bf16")),
    Configuration(name="3 micro-batches, bf16", request=_request(precision="bf16", micro_batches=3)),
    Configuration(
        name="3, reduced in the last, bf16",
        request=_request(precision="bf16", micro_batches=3, gradient_sync="last"),
    ),
    Configuration(
        name="foreach, clipped, bf16", request=_request(precision="bf16", optimizer="adamw-foreach", clip=True)
    ),
    Configuration(name="fused, zeros, fp32", request=_request(optimizer="adamw-fused", zero_grad="zeros")),
    Configuration(
        name="root only, momentum, first", request=_request(optimizer="sgd-momentum"), root_only=True, is_first=True
    ),
    Configuration(name="root only, bf16", request=_request(precision="bf16"), root_only=True),
)
TRACKED = "shard 8, bf16"
"""The configuration in which the others are asked too."""


def make_plan(
    graph: ModelGraph, analysis: Analysis, question: Question, configuration: Configuration
) -> Decisions | None:
    """The decisions of a configuration for a model, ``None`` where it has none of its own."""
    units = [] if configuration.root_only else [(fqn,) for fqn in analysis.order if fqn in first_cut(graph, analysis)]
    if configuration.lists:
        pairs = [(*units[at], *units[at + 1]) for at in range(0, len(units) - 1, 2) if _may_join(analysis, units, at)]
        joined = {module for pair in pairs for module in pair}
        units = [*(unit for unit in units if unit[0] not in joined), *pairs]
        if not pairs:
            return None
    recompute = may_recompute(graph) if configuration.recompute else ()
    if configuration.recompute and not recompute:
        return None
    chosen: Candidate = candidate(units, units if configuration.kept else ())
    return msgspec.structs.replace(decide(graph, analysis.space, question, chosen), recompute=recompute)


def _may_join(analysis: Analysis, units: list[tuple[str, ...]], at: int) -> bool:
    return (units[at][0], units[at + 1][0]) in analysis.space.groupable
