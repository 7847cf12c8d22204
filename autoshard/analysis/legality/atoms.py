"""The atoms: which modules may be units, and which of them must be.

One pass from the leaves to the root. A module is judged by the parameters that it can come to own: those in its
subtree except what lies in a required atom below. Three rules make other atoms required:

- A shared module stands under two parents. A unit that contains one of its places but not all would claim parameters
  that another unit reads, so such a unit is legal only if what the shared module holds is in units of its own.
- Code that updates parameters of other modules in place needs them sharded, so no unit that is unsharded while that
  code runs may own them: what lies below it and holds them is required.
- The trainable parameters of a unit have one stored dtype. Where a subtree mixes them, the children that differ from
  what the module holds itself are required, if that separates the dtypes.
"""

from dataclasses import dataclass, field

from autoshard.analysis.facts import Facts
from autoshard.analysis.legality.modules import bar, is_never_used
from autoshard.analysis.legality.params import is_replicated
from autoshard.findings import Finding


@dataclass(slots=True, kw_only=True)
class Draft:
    """Atoms as found so far.

    Attributes:
        facts: the facts.
        replicated: keys of parameters that no unit shards.
        atoms: FQNs, in post-order.
        required: FQNs of atoms that must be units.
        unused: FQNs of atoms that never run.
        findings: why modules are no atoms.
    """

    facts: Facts
    replicated: frozenset[str]
    atoms: dict[str, None] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    unused: dict[str, None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def find_atoms(facts: Facts) -> Draft:
    """Judge every module; the root is always the last atom."""
    replicated = frozenset(param.key for param in facts.graph.params if is_replicated(param))
    draft = Draft(facts=facts, replicated=replicated)
    for fqn in facts.tree.post_order:
        if fqn == "" or facts.tree.keys(fqn):
            _judge(draft, fqn)
    return draft


def _judge(draft: Draft, fqn: str) -> None:
    facts = draft.facts
    node = facts.tree.nodes[fqn]
    is_unused = fqn != "" and node.has_forward and is_never_used(facts, fqn)
    if is_unused and any(_is_inside_unused(facts, parent) for parent in facts.tree.parents[fqn]):
        return
    required, blocker = _shared_below(draft, fqn)
    required += tuple(atom for atom in _updated_below(draft, fqn) if atom not in required)
    keys = owned_at_most(draft, fqn, required)
    if fqn != "":
        found = (_escape(fqn, blocker) if node.has_forward else None) or bar(facts, fqn, keys)
        if found is not None:
            draft.findings.append(found)
            return
    cut, clash = _separate_dtypes(draft, fqn, keys)
    if clash is not None:
        draft.findings.append(clash)
        if fqn != "":
            return
    draft.atoms[fqn] = None
    draft.required.update(dict.fromkeys((*required, *cut)))
    if is_unused:
        draft.unused[fqn] = None
        draft.findings.append(_unused(fqn))


def owned_at_most(draft: Draft, fqn: str, also_required: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Keys in a module's subtree that no required atom below it owns, replicated ones left out."""
    tree = draft.facts.tree
    gone = set(draft.replicated)
    for atom in tree.below(fqn) & draft.required.keys() | set(also_required):
        if atom != fqn:
            gone.update(tree.keys(atom))
    return tuple(key for key in tree.keys(fqn) if key not in gone)


def _is_inside_unused(facts: Facts, fqn: str) -> bool:
    """The module, or the nearest ancestor with a forward, is itself never used."""
    while fqn and not facts.tree.nodes[fqn].has_forward:
        fqn = facts.tree.nodes[fqn].parent
    return fqn != "" and is_never_used(facts, fqn)


def escaping(facts: Facts, inside: frozenset[str], roots: tuple[str, ...]) -> tuple[str, ...]:
    """Shared modules that stand inside these roots and also under a parent that does not; roots left out."""
    return tuple(
        fqn
        for fqn in facts.shared
        if fqn in inside and fqn not in roots and any(parent not in inside for parent in facts.tree.parents[fqn])
    )


def cover(draft: Draft, fqn: str) -> tuple[str, ...] | None:
    """Atoms that together own all that a module holds, ``None`` if there are none that do."""
    if fqn in draft.atoms:
        return (fqn,)
    tree = draft.facts.tree
    if tree.nodes[fqn].own_params:
        return None
    found: list[str] = []
    for child in tree.nodes[fqn].children:
        if tree.keys(child):
            inner = cover(draft, child)
            if inner is None:
                return None
            found += inner
    return tuple(found)


def _shared_below(draft: Draft, fqn: str) -> tuple[tuple[str, ...], str]:
    """Atoms that a unit here needs because of shared modules, and the shared module that forbids it, if any."""
    required: list[str] = []
    for shared in escaping(draft.facts, draft.facts.tree.below(fqn), (fqn,)):
        atoms = cover(draft, shared)
        if atoms is None:
            return (), shared
        required += atoms
    return tuple(required), ""


def _updated_below(draft: Draft, fqn: str) -> tuple[str, ...]:
    """Atoms that must own the parameters which code running in this module's forward updates while sharded."""
    facts = draft.facts
    required: dict[str, None] = {}
    for key in facts.tree.keys(fqn) if facts.updates else ():
        param = facts.tree.params[key]
        updaters = facts.updates.get(key, frozenset())
        if any(stack[-1] in updaters and fqn in stack for stack in param.readers):
            holding = [atom for atom in outermost(draft, fqn) if key in facts.tree.keys(atom)]
            required.update(dict.fromkeys(holding))
    return tuple(required)


def _escape(fqn: str, blocker: str) -> Finding | None:
    if not blocker:
        return None
    message = f"the module {blocker} in it also stands under a parent outside it, and cannot be a unit of its own"
    return Finding(code="AS206", severity="note", where=fqn, message=message)


def _unused(fqn: str) -> Finding:
    return Finding(
        code="AS204",
        severity="warning",
        where=fqn,
        message="it never runs with these inputs; where it is a unit of its own, it is never unsharded",
        remedy="nothing if no rank ever runs it; if some inputs reach it, plan with such inputs",
    )


def trainable_dtypes(facts: Facts, keys: tuple[str, ...]) -> dict[str, str]:
    """Stored dtypes of the trainable ones among these parameters, each with the first key that has it."""
    found: dict[str, str] = {}
    for key in keys:
        param = facts.tree.params[key]
        if param.requires_grad:
            found.setdefault(param.dtype, key)
    return found


def _separate_dtypes(draft: Draft, fqn: str, keys: tuple[str, ...]) -> tuple[tuple[str, ...], Finding | None]:
    """Atoms that must be units so that what this module owns has one trainable dtype, or why that cannot be."""
    facts = draft.facts
    if len(trainable_dtypes(facts, keys)) <= 1:
        return (), None
    inner = outermost(draft, fqn)
    held = {key for atom in inner for key in facts.tree.keys(atom)}
    residual = tuple(key for key in keys if key not in held)
    fixed = trainable_dtypes(facts, residual)
    if len(fixed) > 1:
        return (), _clash(fqn, fixed)
    dtype = next(iter(fixed), "") or _commonest(facts, keys)
    cut = []
    for atom in inner:
        if set(trainable_dtypes(facts, owned_at_most(draft, atom))) - {dtype}:
            cut.append(atom)
    return tuple(cut), None


def outermost(draft: Draft, fqn: str) -> tuple[str, ...]:
    """Atoms strictly inside a module that are inside no other such atom."""
    tree = draft.facts.tree
    found: dict[str, None] = {}
    stack = list(reversed(tree.nodes[fqn].children))
    seen: set[str] = set()
    while stack:
        inner = stack.pop()
        if inner in seen:
            continue
        seen.add(inner)
        if inner in draft.atoms:
            found[inner] = None
        else:
            stack += reversed(tree.nodes[inner].children)
    return tuple(found)


def _commonest(facts: Facts, keys: tuple[str, ...]) -> str:
    nbytes: dict[str, int] = {}
    for key in keys:
        param = facts.tree.params[key]
        if param.requires_grad:
            nbytes[param.dtype] = nbytes.get(param.dtype, 0) + param.nbytes
    return min(nbytes, key=lambda dtype: (-nbytes[dtype], dtype))


def _clash(fqn: str, dtypes: dict[str, str]) -> Finding:
    named = " and ".join(f"{key} ({dtype})" for dtype, key in dtypes.items())
    what = f"it would own trainable parameters of different dtypes: {named}"
    if fqn:
        return Finding(code="AS209", severity="note", where=fqn, message=what)
    return Finding(
        code="AS209",
        severity="error",
        where="(root)",
        message=what,
        remedy="store both in one dtype, freeze one of them, or move it into a submodule that is called",
    )
