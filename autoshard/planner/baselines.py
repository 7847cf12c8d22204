"""What people use today, as candidates of the same type: the plan is measured against them and never worse.

Baselines know nothing of legality: one that breaks a rule is listed with the diagnostics that forbid it. What each
policy does is stated here from its published behaviour; where a policy needs a name that a user would give (the class
of a block, the embedding, the head), the model's structure stands in for it. The root's reshard flag is the planner's
in all of them, which is never slower than theirs.

- root only: ``fully_shard(model)``.
- per block: ``transformer_auto_wrap_policy`` with the class of the blocks; with every or every other block recomputing.
- FSDP1's size rule (``size_based_auto_wrap_policy``), at its default and at two smaller thresholds that tutorials use.
- accelerate's FSDP2 rule: the embedding, each block, and norm and head together, which are not resharded; norm and head
  join the embedding where they share a weight with it.
- torchtitan's rule for decoders: the same units, with no block, every block or every other block recomputing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.analysis.space import Analysis
from autoshard.ir import ModelGraph, ModuleNode
from autoshard.ir.tree import Tree
from autoshard.plan.schema import Decisions
from autoshard.planner.candidate import Candidate, candidate, decide
from autoshard.request import Question

SIZE_RULE_NUM_PARAMS = (1_000_000, 20_000_000, 100_000_000)
"""Thresholds of FSDP1's size rule; the last is its default (``min_num_params``, torch/distributed/fsdp/wrap.py)."""

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
    """The well-known policies, in the order of the module's page; equal ones are kept apart by name.

    A policy that does not apply to the model (no blocks, no embedding or head) is left out. With ``recompute=full`` all
    blocks recompute in each of them, with ``none`` none does in any.
    """
    return tuple(
        Baseline(name=name, candidate=chosen, decisions=decide(graph, analysis.space, question, chosen))
        for name, chosen in _named(graph, analysis, question)
    )


def _named(graph: ModelGraph, analysis: Analysis, question: Question) -> Iterator[tuple[str, Candidate]]:
    blocks = tuple(unit[0] for unit in _per_block(graph).units)
    rank = {fqn: place for place, fqn in enumerate(analysis.order)}
    blocks = tuple(sorted(blocks, key=lambda fqn: (rank.get(fqn, len(rank)), fqn)))

    def recomputing(name: str, chosen: Candidate) -> Iterator[tuple[str, Candidate]]:
        if question.recompute == "full":
            yield f"{name}, full recompute", candidate(chosen.units, chosen.kept, blocks)
            return
        yield name, chosen
        if question.recompute == "auto" and blocks:
            yield f"{name}, full recompute", candidate(chosen.units, chosen.kept, blocks)
            yield f"{name}, every other block recomputes", candidate(chosen.units, chosen.kept, blocks[1::2])

    everywhere = blocks if question.recompute == "full" else ()
    yield "root only", candidate((), recompute=everywhere)
    yield from recomputing("per block by class name", _per_block(graph))
    for threshold in SIZE_RULE_NUM_PARAMS:
        sized = _by_size(graph, threshold)
        # What recomputes must hold no unit, so a cut inside the blocks has nothing to recompute.
        is_whole = all(unit[0] == fqn or not _is_inside(graph, unit[0], fqn) for unit in sized.units for fqn in blocks)
        chosen = candidate(sized.units, recompute=everywhere if is_whole else ())
        yield f"size rule ({threshold:.0e} parameters)", chosen
    decoder = _decoder(graph, analysis, blocks)
    if decoder is not None:
        yield "accelerate's rule", candidate(decoder.units, decoder.kept, everywhere)
        yield from recomputing("torchtitan's decoder rule", decoder)


def _is_inside(graph: ModelGraph, fqn: str, outer: str) -> bool:
    return fqn in Tree.of(graph).below(outer)


def _decoder(graph: ModelGraph, analysis: Analysis, blocks: tuple[str, ...]) -> Candidate | None:
    """Embedding, each block, norm and head together and kept; ``None`` without blocks, embedding or head."""
    tree = Tree.of(graph)
    rank = {fqn: place for place, fqn in enumerate(analysis.order)}
    inside = frozenset().union(*(tree.below(fqn) for fqn in blocks))
    ran = [fqn for fqn in analysis.order if fqn not in inside and tree.nodes[fqn].own_params]
    embeddings = [fqn for fqn in ran if _short_class(tree.nodes[fqn]).endswith("Embedding")]
    last_block = max((rank[fqn] for fqn in blocks if fqn in rank), default=-1)
    tail = [fqn for fqn in ran if rank[fqn] > last_block >= 0]
    if not embeddings or not tail:
        return None
    embedding, ends = embeddings[0], tuple(tail[-2:])
    is_tied = bool(set(tree.nodes[embedding].own_params) & set(tree.nodes[ends[-1]].own_params))
    if is_tied:
        ends = (embedding, *ends)
    first = () if is_tied else ((embedding,),)
    return candidate((*first, *((fqn,) for fqn in blocks), ends), kept=(ends,))


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
