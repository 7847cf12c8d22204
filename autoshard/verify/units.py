"""Rules about single units: their modules, their parameters, and when these are read."""

from collections.abc import Iterator

from autoshard.analysis.on_demand import on_demand
from autoshard.analysis.order import Run
from autoshard.analysis.updates import sharded_updates
from autoshard.findings import Finding
from autoshard.ir import LOSS, ParamInfo
from autoshard.plan.schema import Decisions, Unit
from autoshard.verify.subject import Subject, finding, named


def modules_take_hooks(subject: Subject) -> Iterator[Finding]:
    """Every module of a unit has a forward, and nothing below a unit refuses hooks."""
    for modules in subject.units:
        for module in modules:
            if not subject.tree.nodes[module].has_forward:
                message = f"{subject.tree.nodes[module].class_name} has no forward, which fully_shard refuses"
                yield finding("AS201", module, message, "name the modules in it instead")
            if "exact-type" in subject.tree.nodes[module].traits:
                message = "the step asks for its exact class, and a unit gets a derived one"
                yield finding("AS227", module, message, "ask with isinstance, or name the modules in it instead")
    for node in subject.graph.modules:
        if "script" in node.traits and subject.tree.keys(node.fqn):
            yield finding("AS202", node.fqn, "a ScriptModule takes no hooks", "plan the module before torch.jit")
        if "lazy" in node.traits:
            yield finding("AS202", node.fqn, "a lazy module has no shapes yet", "run one forward before planning")


def not_on_demand(subject: Subject) -> Iterator[Finding]:
    """No unit lies in a module that only some ranks may run."""
    some_ranks = on_demand(subject.graph)
    for modules, keys in zip(subject.units, subject.owned, strict=True):
        for module in modules:
            around = sorted(some_ranks.keys() & ({module} | subject.tree.above(module)))
            if around and keys:
                message = f"{some_ranks[around[0]]}; ranks that do not run the unit would make the others wait forever"
                yield finding("AS218", module, message, "leave its parameters to a module that every rank runs")


def read_while_unsharded(subject: Subject) -> Iterator[Finding]:
    """Each parameter is read only while a forward of the unit that owns it is running."""
    updates = sharded_updates(subject.graph)
    for unit, modules, keys in zip(subject.plan.units, subject.units, subject.owned, strict=True):
        for key in keys:
            updaters = updates.get(key, frozenset())
            for stack in subject.tree.params[key].readers:
                if stack[-1] in updaters:
                    yield from _updated_unsharded(key, stack, modules, unit.reshard)
                    continue
                if set(stack) & set(modules) or _is_kept(subject, unit, modules, key, stack):
                    continue
                if stack[0] == LOSS:
                    yield from _read_by_loss(key, modules, unit.reshard)
                elif "" not in stack:
                    message = f"{stack[0]} reads it while the root's {subject.graph.entry} is not running"
                    yield finding("AS208", key, message, "run the step through the root's forward")
                else:
                    message = f"{stack[-1] or '(root)'} reads it while no forward of its unit {named(modules)} runs"
                    who = stack[-1] or "(root)"
                    yield finding("AS203", key, message, f"let {who} or an ancestor own it", cause=named(modules))


def _is_kept(subject: Subject, unit: Unit, modules: tuple[str, ...], key: str, stack: tuple[str, ...]) -> bool:
    """The unit is unsharded when this read comes, although none of its forwards runs.

    A unit that does not reshard stays unsharded from its first forward to its own backward. Backward runs in the
    reverse order of forward, so what is read after the unit's forward is needed again before its backward. In a module
    that recomputes, reads come at other times.
    """
    found = [run for module in modules for run in subject.runs.get(module, ())]
    if unit.reshard or not found or ("" not in stack and stack[0] != LOSS):
        return False
    first = min(found, key=lambda run: run.start)
    if first.span.backward is None or not first.span.output_needs_grad or first.region is not subject.graph.root:
        return False
    if any(outer in stack for outer in subject.plan.recompute):
        return False
    reads = [at for at, op in enumerate(first.region.forward) if key in op.params and not op.is_view]
    return all(at >= first.start for at in reads)


def _updated_unsharded(key: str, stack: tuple[str, ...], modules: tuple[str, ...], reshard: bool) -> Iterator[Finding]:
    who = stack[-1] or "(root)"
    if set(stack) & set(modules):
        message = f"{who} updates it in place while unit {named(modules)} is unsharded, and the change would be lost"
        yield finding("AS240", key, message, "make the modules that hold it units of their own", cause=named(modules))
    elif not reshard:
        message = f"{who} updates it in place, but unit {named(modules)} stays unsharded after forward"
        yield finding("AS240", key, message, "set reshard of the unit to true", cause=named(modules))


def _read_by_loss(key: str, modules: tuple[str, ...], reshard: bool) -> Iterator[Finding]:
    if modules != ("",):
        message = f"the loss reads it after the root's forward, but unit {named(modules)} owns it"
        yield finding("AS203", key, message, "leave it to the root")
    elif reshard:
        message = "the loss reads it after the root's forward, but the root reshards then"
        yield finding("AS207", key, message, "set reshard of the root to false")


def written_while_sharded(subject: Subject) -> Iterator[Finding]:
    """No forward writes to a parameter that is unsharded meanwhile: the change would be lost."""
    updates = sharded_updates(subject.graph)
    for keys in subject.owned:
        for key in keys:
            if "written-in-forward" in subject.tree.params[key].traits and key not in updates:
                message = "forward writes to it; where it is unsharded at that moment the change is lost"
                yield finding("AS216", key, message, "move the update out of forward, to after the optimizer step")


def one_trainable_dtype(subject: Subject) -> Iterator[Finding]:
    """The trainable parameters of a unit are stored in one dtype."""
    for modules, keys in zip(subject.units, subject.owned, strict=True):
        first: dict[str, str] = {}
        for key in keys:
            if subject.tree.params[key].requires_grad:
                first.setdefault(subject.tree.params[key].dtype, key)
        if len(first) > 1:
            found = " and ".join(f"{key} ({dtype})" for dtype, key in first.items())
            yield finding(
                "AS209", named(modules), f"it owns trainable parameters of different dtypes: {found}",
                "give the modules of one dtype units of their own",
            )  # fmt: skip


def params_can_be_sharded(subject: Subject) -> Iterator[Finding]:
    """Each parameter that a unit owns is one that FSDP2 can shard."""
    for keys in subject.owned:
        for key in dict.fromkeys(keys):
            for code, message in _obstacles(subject.tree.params[key], subject.plan):
                yield finding(code, key, message)


def _obstacles(param: ParamInfo, plan: Decisions) -> Iterator[tuple[str, str]]:
    if not param.shape:
        yield "AS210", "a scalar cannot be sharded"
    elif 0 in param.shape:
        yield "AS210", "a parameter without elements cannot be sharded"
    if not param.contiguous:
        yield "AS211", "a parameter that is not contiguous cannot be sharded"
    is_cast = (plan.precision.param, plan.precision.reduce) != ("same", "same")
    if param.requires_grad and param.dtype.startswith("complex") and is_cast:
        yield "AS212", f"a {param.dtype} gradient cannot be reduced in {plan.precision.reduce}"
    if "dtensor" in param.traits:
        yield "AS213", "it is a DTensor already"
    if "read-by-alias" in param.traits and param.requires_grad:
        yield "AS221", f"the step reads it through {param.kept_in[0]}, which stays the old whole tensor"
    if "shares-storage" in param.traits:
        yield "AS215", "it shares memory with another parameter, from which sharding separates it"
    if "sparse-grad" in param.traits:
        yield "AS214", "a sparse gradient cannot be reduced"


def shard_dims_divide(subject: Subject) -> Iterator[Finding]:
    """A shard dim belongs to a parameter of its unit, exists, and is divided by the shards."""
    num_shards = subject.plan.num_shards if subject.plan.mesh else 1
    for unit, modules, keys in zip(subject.plan.units, subject.units, subject.owned, strict=True):
        for key, dim in unit.shard_dims.items():
            param = subject.tree.params.get(key)
            if param is None:
                continue
            if key not in keys:
                yield finding("AS219", key, f"unit {named(modules)} gives it a shard dim but does not own it")
            elif not 0 < dim < len(param.shape):
                yield finding("AS219", key, f"it is to be sharded along dim {dim}, but its dims are {param.shape}")
            elif param.shape[dim] % num_shards:
                message = f"dim {dim} has {param.shape[dim]} elements, which {num_shards} shards do not divide"
                yield finding("AS219", key, message, "choose another dim or another number of shards")


def lists_run_once(subject: Subject) -> Iterator[Finding]:
    """Every module of a list unit runs once, apart from the others, and backward enters through the last."""
    for modules in subject.units:
        if len(modules) < 2:
            continue
        for module in modules:
            others = set(modules) & subject.tree.above(module)
            if others:
                yield finding("AS235", module, f"it stands inside {min(others)}, a module of the same unit")
            num_calls = subject.tree.nodes[module].num_calls
            if num_calls != 1:
                message = f"it runs {num_calls} times; a module of a list unit must run exactly once"
                yield finding("AS235", module, message, "give it a unit of its own")
        yield from _last_is_hooked(subject, modules)


def _last_is_hooked(subject: Subject, modules: tuple[str, ...]) -> Iterator[Finding]:
    ran = sorted((run for module in modules for run in subject.runs.get(module, ())), key=lambda run: run.start)
    if not ran:
        return
    if ran[-1].span.backward is None or not ran[-1].span.output_needs_grad:
        message = f"it runs last in unit {named(modules)}, but its result does not reach the loss"
        yield finding("AS235", ran[-1].module, message, "end the list with a module through which backward passes")
    order = tuple(dict.fromkeys(run.module for run in ran))
    if order != modules and set(order) == set(modules):
        message = f"the modules of the unit are not in execution order, which is {named(order)}"
        yield finding("AS235", modules[0], message, severity="warning")


def results_carry_hooks(subject: Subject) -> Iterator[Finding]:
    """Where backward enters a unit, FSDP2 finds a tensor in the unit's result on which it can put its hook."""
    for unit, modules, keys in zip(subject.plan.units, subject.units, subject.owned, strict=True):
        for module in modules:
            hidden = next((run for run in subject.runs.get(module, ()) if _is_hidden(run)), None)
            if hidden is None:
                continue
            kind = hidden.span.output_kind.removeprefix("opaque:")
            message = f"FSDP2 finds no tensor with a gradient in its result ({kind}), but backward passes through it"
            if modules != ("",):
                if keys:
                    yield finding("AS217", module, message, "let an ancestor own its parameters")
            elif unit.reshard or not _has_hooked_unit(subject):
                remedy = "keep the root unsharded, and give a module inside it that trains a unit of its own"
                yield finding("AS217", module, message, remedy)


def hooks_in_time(subject: Subject) -> Iterator[Finding]:
    """Backward reads what a unit owns after FSDP2's hook on the unit's result has gathered it."""
    for modules, keys in zip(subject.units, subject.owned, strict=True):
        for module in modules:
            for run in subject.runs.get(module, ()):
                early = [key for key in run.span.early_params if key in keys]
                if early and not _is_hidden(run) and module:
                    message = f"backward reads {early[0]} before FSDP2's hook on the result of {module} has gathered it"
                    remedy = "let an ancestor own its parameters, or return every tensor that is used later"
                    yield finding("AS225", module, message, remedy)
                    break


def inputs_stay(subject: Subject) -> Iterator[Finding]:
    """No unit changes one of its inputs in place: FSDP2 hands in a view that forbids it."""
    for modules, keys in zip(subject.units, subject.owned, strict=True):
        for module in modules if keys else ():
            if any(run.span.changes_input for run in subject.runs.get(module, ())):
                message = "its forward changes one of its inputs in place, which raises in a unit"
                yield finding("AS226", module, message, "let an ancestor own its parameters, or compute out of place")


def _has_hooked_unit(subject: Subject) -> bool:
    """Some unit other than the root gets a pre-backward hook, and with it the end of backward is seen."""
    return any(
        run.span.backward is not None and run.span.output_needs_grad
        for modules, keys in zip(subject.units, subject.owned, strict=True)
        if modules != ("",) and keys
        for module in modules
        for run in subject.runs.get(module, ())
    )


def _is_hidden(run: Run) -> bool:
    span = run.span
    if span.backward is None:
        return False
    if not span.output_needs_grad:
        return True
    if not span.output_kind.startswith("opaque:"):
        return False
    # Some tensors are visible and some are not. What later code reads of the run must all be in what is visible.
    first, end = span.forward
    used = set()
    for op in run.region.forward[end:]:
        for index in op.inputs:
            born = run.region.storages[index].born
            if born.phase == "forward" and first <= born.index < end:
                used.add(index)
    return sum(run.region.storages[index].nbytes for index in used) > span.output_bytes
