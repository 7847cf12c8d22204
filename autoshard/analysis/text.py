"""The facts and the legal space as stable text, for ``--dump analysis`` and ``--dump space`` and for golden tests."""

from collections.abc import Iterator

from autoshard.analysis.space import Analysis, Atom, LegalSpace


def format_analysis(analysis: Analysis) -> str:
    """The text of all facts but the space. Ends with a newline."""
    lines = ["order", *(f"  {_name(fqn)}" for fqn in analysis.order)]
    lines += ["ties", *(f"  {key}: {', '.join(map(_name, holders))}" for key, holders in analysis.ties)]
    lines += ["outside reads"]
    lines += [f"  {key}: {' > '.join(map(_name, stack))}" for key, stack in analysis.outside_reads]
    lines += ["blocks"]
    lines += [f"  {block.repeat_class} x{len(block.modules)}: {', '.join(block.modules)}" for block in analysis.blocks]
    lines += ["memory (bytes kept for backward, highest rise in forward)"]
    lines += [f"  {_name(each.module)}: {each.saved_bytes}, {each.peak_bytes}" for each in analysis.memory]
    return "\n".join(lines) + "\n"


def format_space(space: LegalSpace) -> str:
    """The text of a legal space: the tree of atoms, what is forced, and why. Ends with a newline."""
    return "\n".join(_space(space)) + "\n"


def _space(space: LegalSpace) -> Iterator[str]:
    yield f"atoms ({len(space.atoms)})"
    atoms = {atom.module: atom for atom in space.atoms}
    yield from _atom_tree(atoms, "", 1, frozenset(space.required))
    yield from (f"joint: {', '.join(modules)}" for modules in space.joint)
    yield from (f"groupable: {first}, {second}" for first, second in space.groupable)
    yield from (f"replicated: {key}" for key in space.replicated)
    yield from (f"shard dim: {key} {dim}" for key, dim in sorted(space.shard_dims.items()))
    if space.root_must_keep:
        yield "the root must not reshard"
    if space.reduce_unused:
        yield "unused parameters take part in the reduction"
    yield from (f"method: {_name(module)} {method}" for module, method in space.methods)
    yield from (f"may recompute: {fqn}" for fqn in space.recomputable)
    yield from (f"must reshard: {key}" for key in space.must_reshard)
    yield from (f"rebuilt buffer: {name}" for name in space.rebuilt_buffers)
    yield from map(str, space.diagnostics)


def _atom_tree(atoms: dict[str, Atom], fqn: str, depth: int, required: frozenset[str]) -> Iterator[str]:
    atom = atoms[fqn]
    notes = [f"x{atom.num_calls}", f"owns {len(atom.residual)} of {len(atom.params)}"]
    if fqn in required:
        notes.append("required")
    if atom.repeat_class:
        notes.append(f"block {atom.repeat_class}")
    if atom.defers_post_backward:
        notes.append("freed at the end of backward")
    yield "  " * depth + f"{_name(fqn)}: {', '.join(notes)}"
    for child in atom.children:
        yield from _atom_tree(atoms, child, depth + 1, required)


def _name(fqn: str) -> str:
    return fqn or "(root)"
