"""What people use today, as candidates of the same type: the plan is measured against them and never worse.

Baselines know nothing of legality: one that breaks a rule is listed with the diagnostics that forbid it.
"""

from dataclasses import dataclass

from autoshard.analysis.space import Analysis
from autoshard.ir import ModelGraph, ModuleNode
from autoshard.plan.schema import Decisions
from autoshard.planner.candidate import Candidate, candidate, decide
from autoshard.request import Question

SIZE_RULE_NUM_PARAMS = 100_000_000
"""Default threshold of FSDP1's size rule (``min_num_params``, torch/distributed/fsdp/wrap.py)."""

_CONTAINERS = ("ModuleList", "ModuleDict")
_NEVER_CUT = ("MultiheadAttention",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A well-known policy applied to a model.

    Attributes:
        name: what people call it.
        candidate: its units.
        decisions: the plan that it makes.
    """

    name: str
    candidate: Candidate
    decisions: Decisions


def baselines(graph: ModelGraph, analysis: Analysis, question: Question) -> tuple[Baseline, ...]:
    """Root only, per block by class name, and FSDP1's size rule, in this order; equal ones are kept apart by name."""
    named = [
        ("root only", candidate(())),
        ("per block by class name", _per_block(graph)),
        (f"size rule ({SIZE_RULE_NUM_PARAMS:.0e} parameters)", _by_size(graph, SIZE_RULE_NUM_PARAMS)),
    ]
    return tuple(
        Baseline(name=name, candidate=chosen, decisions=decide(graph, analysis.space, question, chosen))
        for name, chosen in named
    )


def _short_class(node: ModuleNode) -> str:
    return node.class_name.rpartition(".")[2]


def _numels(graph: ModelGraph) -> dict[str, int]:
    """Parameters in each module's subtree, each parameter object once per subtree."""
    nodes = {node.fqn: node for node in graph.modules}
    numel = {param.key: param.numel for param in graph.params}
    keys: dict[str, set[str]] = {}
    for node in reversed(graph.modules):
        own = set(node.own_params)
        keys[node.fqn] = own.union(*(_keys_below(child, keys, nodes) for child in node.children))
    return {fqn: sum(numel[key] for key in below) for fqn, below in keys.items()}


def _keys_below(fqn: str, keys: dict[str, set[str]], nodes: dict[str, ModuleNode]) -> set[str]:
    # A shared child stands under a later parent too, and is then not yet listed in the reversed pre-order.
    if fqn not in keys:
        node = nodes[fqn]
        keys[fqn] = set(node.own_params).union(*(_keys_below(child, keys, nodes) for child in node.children))
    return keys[fqn]


def _per_block(graph: ModelGraph) -> Candidate:
    """What ``transformer_auto_wrap_policy`` does with the class that a user would name.

    That class is the one that stands most often as a child of a list, by the parameters that its modules hold.
    """
    nodes = {node.fqn: node for node in graph.modules}
    numel = _numels(graph)
    held: dict[str, int] = {}
    counts: dict[str, int] = {}
    for node in graph.modules:
        if node.fqn and _short_class(nodes[node.parent]) in ("ModuleList", "Sequential") and numel[node.fqn]:
            held[node.class_name] = held.get(node.class_name, 0) + numel[node.fqn]
            counts[node.class_name] = counts.get(node.class_name, 0) + 1
    named = sorted((name for name in held if counts[name] > 1), key=lambda name: (-held[name], name))
    if not named:
        return candidate(())
    return candidate((node.fqn,) for node in graph.modules if node.class_name == named[0] and numel[node.fqn])


def _by_size(graph: ModelGraph, min_num_params: int) -> Candidate:
    """FSDP1's ``size_based_auto_wrap_policy``: bottom up, wrap what is still unwrapped and large enough.

    Source: torch/distributed/fsdp/wrap.py, ``_recursive_wrap`` and ``size_based_auto_wrap_policy``.
    """
    nodes = {node.fqn: node for node in graph.modules}
    numel = _numels(graph)
    units: list[tuple[str, ...]] = []

    def wrap(fqn: str) -> int:
        """Wrap below and maybe at a module; the number of parameters wrapped there."""
        node = nodes[fqn]
        if numel[fqn] < min_num_params or _short_class(node) in _NEVER_CUT:
            return 0
        wrapped = sum(wrap(child) for child in node.children)
        if fqn and numel[fqn] - wrapped >= min_num_params and _short_class(node) not in _CONTAINERS:
            units.append((fqn,))
            return numel[fqn]
        return wrapped

    wrap("")
    return candidate(units)
