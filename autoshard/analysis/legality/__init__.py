"""Legality: from facts to the space of plans that FSDP2 runs rightly.

``params`` and ``modules`` are tables of rules about one parameter or one module; ``atoms`` judges the whole tree,
``lists`` finds what may share a unit. Here the results become one ``LegalSpace``.
"""

from autoshard.analysis.facts import Facts
from autoshard.analysis.legality.atoms import Draft, find_atoms, outermost
from autoshard.analysis.legality.lists import groupable_pairs, joint_sets
from autoshard.analysis.legality.params import choose_shard_dims, param_findings
from autoshard.analysis.legality.root import exact_root, hookless_modules, must_keep_root
from autoshard.analysis.recompute import recomputable
from autoshard.analysis.space import Atom, LegalSpace
from autoshard.findings import condense

__all__ = ["legal_space"]


def legal_space(facts: Facts, methods: tuple[tuple[str, str], ...] = ()) -> LegalSpace:
    """The legal plans of a graph, with the reasons.

    Args:
        facts: what is known about the graph.
        methods: ``(module, method)`` pairs that the user wants registered.
    """
    draft = find_atoms(facts)
    shard_dims, notes = choose_shard_dims(facts)
    keep = must_keep_root(draft)
    repeatable = recomputable(facts.graph)
    findings = (*param_findings(facts), *hookless_modules(facts), *exact_root(facts), *draft.findings, *notes)
    return LegalSpace(
        atoms=_atoms(draft),
        required=tuple(fqn for fqn in draft.atoms if fqn in draft.required),
        joint=joint_sets(draft),
        groupable=groupable_pairs(draft),
        replicated=tuple(key for key in facts.tree.params if key in draft.replicated),
        shard_dims=shard_dims,
        recomputable=repeatable.modules,
        must_reshard=tuple(key for key in facts.tree.params if key in facts.updates),
        root_must_keep=keep,
        reduce_unused=bool(facts.on_demand) or any("conditional" in param.traits for param in facts.graph.params),
        methods=tuple(dict.fromkeys(methods)),
        rebuilt_buffers=tuple(buffer.name for buffer in facts.graph.buffers if not buffer.persistent),
        diagnostics=(*condense(findings), *repeatable.diagnostics),
    )


def _atoms(draft: Draft) -> tuple[Atom, ...]:
    facts, tree = draft.facts, draft.facts.tree
    rank = {fqn: index for index, fqn in enumerate(dict.fromkeys((*facts.order, *tree.nodes)))}
    ordered = sorted(draft.atoms, key=lambda fqn: (fqn != "", fqn in draft.unused, rank[fqn]))
    order = {fqn: index for index, fqn in enumerate(ordered)}
    parent = _parents(draft)
    children: dict[str, list[str]] = {fqn: [] for fqn in draft.atoms}
    for fqn in ordered:
        if fqn != "":
            children[parent[fqn]].append(fqn)
    in_block = {module: block.repeat_class for block in facts.blocks for module in block.modules}
    params: dict[str, tuple[str, ...]] = {}
    atoms = []
    for fqn in draft.atoms:
        inner = {key for atom in outermost(draft, fqn) for key in tree.keys(atom)}
        residual = tuple(key for key in tree.keys(fqn) if key not in inner and key not in draft.replicated)
        below = dict.fromkeys(residual)
        for child in children[fqn]:
            below.update(dict.fromkeys(params[child]))
        params[fqn] = tuple(below)
        atoms.append(
            Atom(
                module=fqn,
                parent=parent[fqn],
                children=tuple(children[fqn]),
                params=params[fqn],
                residual=residual,
                num_calls=tree.nodes[fqn].num_calls,
                order=order[fqn],
                repeat_class=in_block.get(fqn, ""),
                defers_post_backward=_defers(facts, fqn, params[fqn]),
            )
        )
    return tuple(atoms)


def _parents(draft: Draft) -> dict[str, str]:
    """For each atom the nearest atom that contains every place where it stands."""
    tree = draft.facts.tree
    chains: dict[str, tuple[str, ...]] = {"": ("",)}

    def chain(fqn: str) -> tuple[str, ...]:
        """Modules through which every path from the root to this one leads, outermost first."""
        if fqn not in chains:
            above = [chain(parent) for parent in tree.parents[fqn]]
            common = 0
            while all(len(one) > common and one[common] == above[0][common] for one in above):
                common += 1
            chains[fqn] = (*above[0][:common], fqn)
        return chains[fqn]

    return {
        fqn: next((outer for outer in reversed(chain(fqn)[:-1]) if outer in draft.atoms), "") for fqn in draft.atoms
    }


def _defers(facts: Facts, fqn: str, keys: tuple[str, ...]) -> bool:
    runs = facts.runs.get(fqn, ())
    return (
        bool(runs)
        and not any(run.span.inputs_need_grad for run in runs)
        and any(facts.tree.params[key].requires_grad for key in keys)
    )
