"""Rules about the plan as a whole: names, order, the root, who owns what, and what has to be said beside the units."""

from collections.abc import Iterator

from autoshard.analysis.ownership import unit_digest
from autoshard.analysis.recompute import mingling
from autoshard.findings import Finding
from autoshard.verify.subject import Subject, finding, named


def names_exist(subject: Subject) -> Iterator[Finding]:
    """Everything that the plan names is in the model."""
    plan, tree = subject.plan, subject.tree
    again = "make the plan again from this model"
    modules = [module for unit in plan.units for module in unit.modules]
    modules += [*plan.recompute, *plan.compile, *(method.module for method in plan.methods)]
    for module in dict.fromkeys(modules):
        if tree.canonical(module) is None:
            yield finding("AS230", module, "the model has no such module", again)
    keys = [key for unit in plan.units for key in unit.shard_dims]
    for key in dict.fromkeys([*keys, *plan.replicated]):
        if key not in tree.params:
            yield finding("AS230", key, "the model has no parameter of that first name", again)
    buffers = {buffer.name for buffer in subject.graph.buffers}
    for name in plan.rebuilt_buffers:
        if name not in buffers:
            yield finding("AS230", name, "the model has no such buffer", again)
    if plan.entry != subject.graph.entry:
        message = f"the plan's entry is {plan.entry}, the model was captured through {subject.graph.entry}"
        yield finding("AS230", "entry", message, again)


def named_once(subject: Subject) -> Iterator[Finding]:
    """No module stands in two units, by any of its names."""
    seen: dict[str, tuple[str, ...]] = {}
    for modules in subject.units:
        for module in modules:
            if module in seen:
                where = f"units {named(seen[module])} and {named(modules)} both name it"
                yield finding("AS231", module, where, "name each module in one unit, once")
            seen[module] = modules


def root_last(subject: Subject) -> Iterator[Finding]:
    """The last unit is the root, alone."""
    if not subject.units or subject.units[-1] != ("",):
        last = named(subject.units[-1]) if subject.units else "missing"
        message = f"the last unit must be the root alone, but is {last}"
        yield finding("AS232", "", message, 'add a last unit with modules [""]')
    for modules in subject.units[:-1]:
        if "" in modules:
            yield finding("AS232", "", f"the root stands in unit {named(modules)}, which is not the last one")


def inner_first(subject: Subject) -> Iterator[Finding]:
    """A unit is applied before every unit that contains one of its modules."""
    unit_of = subject.unit_of
    for index, modules in enumerate(subject.units):
        for module in modules:
            for outer in sorted(subject.tree.above(module)):
                if unit_of.get(outer, index) < index:
                    message = f"it stands inside {outer or '(root)'}, whose unit is applied before"
                    yield finding("AS233", module, message, "list inner units before outer ones")


def owned_once(subject: Subject) -> Iterator[Finding]:
    """Every parameter has one owner: a unit, or all ranks if it is replicated."""
    owner: dict[str, int] = {}
    for index, keys in enumerate(subject.owned):
        for key in keys:
            if key not in owner:
                owner[key] = index
                continue
            first, second = subject.units[owner[key]], subject.units[index]
            if any(subject.tree.is_inside(inner, outer) for inner in second for outer in first):
                continue  # the order is wrong, which is another rule's finding
            units = f"{named(first)} and {named(second)}"
            param = subject.tree.params[key]
            if len(param.holders) > 1:
                message = f"it is shared, and units {units} both hold it"
                remedy = f"put {named(param.holders)} into one unit, or leave all of them to a common ancestor"
                yield finding("AS205", key, message, remedy)
            else:
                message = f"its module stands in both units {units}"
                yield finding("AS206", key, message, "make the shared module a unit of its own, applied before both")
    for key in subject.tree.params:
        if key not in owner and key not in subject.plan.replicated:
            yield finding("AS234", key, "no unit owns it, so its gradient is never reduced")


def figures_agree(subject: Subject) -> Iterator[Finding]:
    """Counts, bytes and digest of each unit are those of the parameters that it owns."""
    for unit, modules, keys in zip(subject.plan.units, subject.units, subject.owned, strict=True):
        num_bytes = sum(subject.tree.params[key].nbytes for key in keys)
        stated = (unit.num_params, unit.num_bytes, unit.digest)
        found = (len(keys), num_bytes, unit_digest(keys))
        if stated != found:
            message = (
                f"the plan says {stated[0]} parameters, {stated[1]} bytes, digest {stated[2]}; "
                f"by its modules the unit owns {found[0]} parameters, {found[1]} bytes, digest {found[2]}"
            )
            yield finding("AS236", named(modules), message, "make the plan again from this model")


def recompute_inside_units(subject: Subject) -> Iterator[Finding]:
    """A recomputed module runs, contains no unit and no other recomputed module, and may run twice."""
    tree = subject.tree
    recompute = [fqn for fqn in map(tree.canonical, subject.plan.recompute) if fqn is not None]
    unit_of = subject.unit_of
    mingled = {fqn for region in subject.graph.regions for fqn in mingling(region.spans)} if recompute else set()
    for fqn in recompute:
        inside = tree.below(fqn) - {fqn}
        units = sorted(inside & unit_of.keys())
        if units:
            message = f"the unit {units[0]} stands inside it; recomputing unshards all of them at once"
            yield finding("AS237", fqn, message, "recompute the unit or something inside it")
        if sorted(inside & set(recompute)):
            yield finding("AS237", fqn, "another recomputed module stands inside it", "name only one of them")
        if not tree.nodes[fqn].num_calls:
            yield finding("AS237", fqn, "it never runs, so there is nothing to recompute", severity="warning")
        if fqn in mingled:
            message = "two of its runs mingle in backward, and their recompute cannot be projected"
            yield finding("AS237", fqn, message, "leave it out of recompute")
        for inner in sorted(tree.below(fqn)):
            traits = tree.nodes[inner].traits
            if "batch-statistics" in traits:
                message = f"{inner} in it keeps statistics over batches, which would be updated twice"
                yield finding("AS237", fqn, message, "leave it out of recompute")
            if "checkpointed" in traits:
                message = f"{inner or '(root)'} in it recomputes by itself already"
                yield finding("AS237", fqn, message, "leave it out of recompute")


def mesh_is_known(subject: Subject) -> Iterator[Finding]:
    """One axis that shards, or two of which the outer replicates."""
    mesh = subject.plan.mesh
    roles = tuple(axis.role for axis in mesh)
    if roles not in (("shard",), ("replicate", "shard")):
        message = f"its axes have the roles ({', '.join(roles)})"
        yield finding("AS238", "mesh", message, "use one axis (shard) or two (replicate, shard)")
    if len({axis.name for axis in mesh}) < len(mesh) or any(not axis.name for axis in mesh):
        yield finding("AS238", "mesh", "its axes need names, and distinct ones")
    for axis in mesh:
        if axis.size < 1:
            yield finding("AS238", "mesh", f"axis {axis.name} has size {axis.size}")


def forced_decisions(subject: Subject) -> Iterator[Finding]:
    """What the model leaves no choice about stands in the plan."""
    space = subject.analysis.space
    methods = {(method.module, method.method) for method in subject.plan.methods}
    members = {module for modules in subject.units for module in modules}
    for module, method in space.methods:
        if module in members and (module, method) not in methods:
            message = f"its method {method} runs the unit but is not registered"
            yield finding("AS239", module, message, "add it to the plan's methods")
    if space.reduce_unused and not subject.plan.reduce_unused:
        message = "some parameters may get no gradient on some ranks, so unused ones must take part in the reduction"
        yield finding("AS239", "reduce_unused", message, "set it to true")
