"""Random small models with everything that makes sharding hard, and plans made by hand from a legal space."""

from collections.abc import Iterable, Sequence
from random import Random

from autoshard.analysis import Analysis
from autoshard.analysis.ownership import application_order, owners, unit_digest
from autoshard.ir import ModelGraph
from autoshard.plan.schema import Axis, Decisions, Method, Precision, Unit
from tests.graphs import Mod, Par, build, mod

NUM_SHARDS = 4


def random_graph(random: Random) -> ModelGraph:
    """A step of a random model: nested and shared modules, ties, outside reads, mixed dtypes, hidden results."""
    root, loss_reads = random_model(random)
    return build(root, loss_reads=loss_reads)


def random_model(random: Random) -> tuple[Mod, tuple[str, ...]]:
    """A random model, and the keys of the parameters that its loss reads."""
    pool: list[Par] = []
    built: list[Mod] = []
    traps = random.randint(0, 3)
    root = _module(random, "", 0, pool, built, traps)
    if not root.children:
        root.children = (_module(random, "only", 3, pool, built, traps),)
    return root, _loss_reads(random, root, traps)


def _module(random: Random, name: str, depth: int, pool: list[Par], built: list[Mod], traps: int) -> Mod:
    children: list[Mod] = []
    for _ in range(random.randint(0, 3) if depth < 3 else 0):
        if built and traps and random.random() < 0.15:
            shared = random.choice(built)
            if all(shared.name != child.name for child in children):
                children.append(shared)
                continue
        children.append(_module(random, f"m{len(built)}", depth + 1, pool, built, traps))
    is_container = bool(children) and name != "" and random.random() < 0.25
    made = mod(name, *children, has_forward=not is_container, cls=random.choice("AB"))
    for index in range(0 if is_container and random.random() < 0.9 else random.randint(0 if children else 1, 2)):
        made.params[f"p{index}"] = _param(random, pool, traps)
    if traps:
        made.called = random.random() > 0.06
        made.no_grad = name != "" and random.random() < 0.04
        made.takes_grad = random.random() > 0.1
        if random.random() < 0.05:
            made.output_kind = "opaque:State"
    if not is_container:
        _repeat_or_read(random, made, traps)
    if name:
        built.append(made)
    return made


def _param(random: Random, pool: list[Par], traps: int) -> Par:
    if pool and traps and random.random() < 0.08:
        return random.choice(pool)
    dtype = "bfloat16" if traps > 1 and random.random() < 0.15 else "float32"
    shape = (random.choice((1, 2, 4, 7, 16)), random.choice((3, 8, 20_000)))
    pool.append(Par(shape=shape, dtype=dtype, requires_grad=random.random() > 0.1))
    return pool[-1]


def _repeat_or_read(random: Random, made: Mod, traps: int) -> None:
    """Now and then call a child again, or read a child's parameter without calling the child."""
    steps: list[str] = []
    for child in made.children:
        if not child.has_forward or not child.called:
            continue
        steps += [child.name] * (2 if traps and random.random() < 0.08 else 1)
        if traps and child.params and random.random() < 0.08:
            steps.append(f"peek {child.name}")
    if steps and made.children and all(child.has_forward for child in made.children):
        made.body = (*steps, "own")


def _loss_reads(random: Random, root: Mod, traps: int) -> tuple[str, ...]:
    keys = [f"{child.name}.{name}" for child in root.children for name in child.params]
    return (random.choice(keys),) if traps > 2 and keys and random.random() < 0.3 else ()


def decide(graph: ModelGraph, analysis: Analysis, units: Iterable[Sequence[str]], reshard: bool = True) -> Decisions:
    """A plan of these units and the root, with all that follows from them."""
    space = analysis.space
    order = application_order(graph, (*(tuple(unit) for unit in units), ("",)))
    sizes = {param.key: param.nbytes for param in graph.params}
    made = []
    for modules, keys in zip(order, owners(graph, order, space.replicated), strict=True):
        made.append(
            Unit(
                modules=modules,
                reshard=reshard and not (modules == ("",) and space.root_must_keep),
                num_params=len(keys),
                num_bytes=sum(sizes[key] for key in keys),
                digest=unit_digest(keys),
                shard_dims={key: space.shard_dims[key] for key in keys if key in space.shard_dims},
            )
        )
    return Decisions(
        entry=graph.entry,
        mesh=(Axis(name="shard", size=NUM_SHARDS, role="shard"),),
        precision=Precision(),
        units=tuple(made),
        methods=tuple(Method(module=module, method=method) for module, method in space.methods),
        replicated=space.replicated,
        reduce_unused=space.reduce_unused,
    )


def random_units(random: Random, graph: ModelGraph, analysis: Analysis) -> list[tuple[str, ...]]:
    """Units inside the space: any atoms, all that is required, any joint sets, some neighbours grouped."""
    space = analysis.space
    chosen = {atom.module for atom in space.atoms if atom.module and random.random() < 0.5} | set(space.required)
    joint = [members for members in space.joint if random.random() < 0.5]
    groups = [*joint, *_groups(random, analysis, chosen)]
    try:
        application_order(graph, (*groups, ("",)))
    except ValueError:  # groups that contain members of each other: the space says that they exclude each other
        return [*joint, *((fqn,) for fqn in sorted(chosen))]
    return groups


def _groups(random: Random, analysis: Analysis, chosen: set[str]) -> list[tuple[str, ...]]:
    space = analysis.space
    after: dict[str, list[str]] = {}
    for first, second in space.groupable:
        after.setdefault(first, []).append(second)
    groups: list[tuple[str, ...]] = []
    order = {atom.module: atom.order for atom in space.atoms}
    taken: set[str] = set()
    for fqn in sorted(chosen, key=lambda fqn: order[fqn]):
        if fqn in taken:
            continue
        group = [fqn]
        while random.random() < 0.5:
            following = [other for other in after.get(group[-1], ()) if other in chosen and other not in taken]
            if not following:
                break
            group.append(random.choice(following))
        taken.update(group)
        groups.append(tuple(group))
    return groups
