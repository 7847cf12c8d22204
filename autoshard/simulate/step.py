"""Replay one training step of FSDP2 under a plan: graph and decisions in, timeline out."""

from autoshard.cost import Group, rates
from autoshard.errors import RequestError
from autoshard.ir import ModelGraph
from autoshard.ir.tree import Tree
from autoshard.plan import Decisions
from autoshard.request import Question
from autoshard.simulate.dtype_copies import with_copies
from autoshard.simulate.fold import fold
from autoshard.simulate.hooks import step_events
from autoshard.simulate.optimizer import clip_bytes, optimizer_sizes
from autoshard.simulate.profile import StepProfile, profile_step
from autoshard.simulate.state import Setup, start
from autoshard.simulate.timeline import Collective, Timeline
from autoshard.simulate.units import Links, UnitSizes, averaged_bytes, unit_sizes


def simulate(
    graph: ModelGraph,
    decisions: Decisions,
    question: Question,
    profile: StepProfile | None = None,
    *,
    is_first: bool = False,
) -> Timeline:
    """One training step: by default a later one, in which the optimizer's state exists.

    Args:
        graph: the captured step, in the compute dtype of the plan.
        decisions: the plan; its mesh, precision and micro-batches count, not those of the question.
        question: for the device, the optimizer, clipping and ``zero_grad``.
        profile: ``profile_step(graph, question, decisions.recompute)``, if it was made already; one with another set
            of recomputing modules is not used.
        is_first: the first step: the optimizer makes its state in it, and there are no gradients before.

    Raises:
        RequestError: the plan asks for what cannot be projected (offload, casts of outputs, a mesh of other axes, a
            module that cannot recompute).
        GraphError: the graph has no step.
    """
    if profile is None or profile.recompute != decisions.recompute:
        profile = profile_step(graph, question, decisions.recompute)
    setup = _setup(graph, decisions, question, profile)
    profile = setup.profile
    has_gradients = question.zero_grad == "zeros" and not is_first
    events = step_events(graph, decisions, setup.units, profile, clips=question.clip, has_gradients=has_gradients)
    first = start(setup, has_state=not is_first, has_gradients=has_gradients)
    summits, end = fold(setup, first, events)
    return Timeline(setup=setup, start=first, events=events, summits=summits, end=end)


def expected_collectives(
    graph: ModelGraph, decisions: Decisions, question: Question, profile: StepProfile | None = None
) -> tuple[Collective, ...]:
    """The collectives that a step under the plan issues, in order. Raises as ``simulate`` does."""
    return tuple(simulate(graph, decisions, question, profile).collectives())


def _setup(graph: ModelGraph, decisions: Decisions, question: Question, profile: StepProfile) -> Setup:
    if decisions.offload != "none":
        raise RequestError("offload", decisions.offload, "none: offloading cannot be projected")
    if decisions.precision.output != "same":
        expected = "same: what casts of the outputs of units take cannot be projected"
        raise RequestError("precision.output", decisions.precision.output, expected)
    roles = tuple(axis.role for axis in decisions.mesh)
    if roles not in (("shard",), ("replicate", "shard")):
        raise RequestError("mesh", " x ".join(roles), "one shard axis, or a replicate axis and a shard axis")
    device = question.profile
    num_shards, num_replicas = decisions.num_shards, decisions.num_devices // decisions.num_shards
    shard = Group.of(device, num_shards)
    replicate = Group.of(device, num_replicas, stride=num_shards)
    reached = rates(device, graph.compute_dtype)
    units = unit_sizes(graph, decisions, Links(shard=shard, replicate=replicate, rates=reached))
    profile = with_copies(graph, decisions, units, profile)
    tree = Tree.of(graph)
    gradient_bytes = {key: gradient.unsharded_bytes for unit in units for key, gradient in unit.gradients}
    gradient_bytes |= {key: tree.params[key].nbytes for key in decisions.replicated}
    ran = [unit for unit in units if any(module in profile.runs for module in unit.modules)]
    leaves_zeros = question.zero_grad == "zeros"
    sizes = optimizer_sizes(question.optimizer, tree, ran, decisions, device.kind, reached)
    return Setup(
        profile=profile,
        units=units,
        gradient_bytes=gradient_bytes,
        averaged_bytes=averaged_bytes(tree, decisions),
        replicated_bytes=sum(tree.params[key].nbytes for key in decisions.replicated),
        mesh_groups=(shard,) if len(roles) == 1 else (replicate, shard),
        num_replicas=num_replicas,
        optimizer=sizes,
        unit_host_ns=device.unit_host_ns,
        is_serial=device.overlap == "none",
        left_gradient_bytes=_left(decisions, profile, ran, gradient_bytes) if leaves_zeros else (0, 0),
        frees_gradients=not leaves_zeros,
        clip_bytes=clip_bytes(sizes.num_trained),
    )


def _left(
    decisions: Decisions, profile: StepProfile, ran: list[UnitSizes], gradient_bytes: dict[str, int]
) -> tuple[int, int]:
    """Gradients at the end of a step: shards, and whole ones of replicated parameters."""
    present = {moment.key for moment in profile.gradients}
    shards = sum(
        size.sharded_bytes for unit in ran for key, size in unit.gradients if key in present or decisions.reduce_unused
    )
    return shards, sum(gradient_bytes[key] for key in decisions.replicated if key in present)
