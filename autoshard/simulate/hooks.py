"""The events of one step: FSDP2's hooks, replayed over a plan, say what is gathered, freed and reduced, and when.

This is the logic of FSDP2 without bytes or time: the state machine of each parameter group and where its hooks run.
The names in comments are those of ``torch/distributed/fsdp/_fully_shard`` (torch 2.13). The fold adds bytes and time.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from autoshard.errors import RequestError
from autoshard.ir import ModelGraph
from autoshard.ir.tree import Tree
from autoshard.plan import Decisions
from autoshard.simulate.event import Event, Kind, Phase
from autoshard.simulate.group import Group
from autoshard.simulate.profile import ModuleRun, StepProfile
from autoshard.simulate.units import Reduction, UnitSizes, averaged_bytes

_POST_BACKWARD, _REPLAYED, _PRE_BACKWARD, _REPLAY = range(4)
"""Turns of the hooks that stand at one position: what ends comes before what begins."""


def step_events(
    graph: ModelGraph,
    decisions: Decisions,
    units: Sequence[UnitSizes],
    profile: StepProfile,
    *,
    clips: bool = False,
    has_gradients: bool = False,
) -> tuple[Event, ...]:
    """The events of one training step, in order; forward and backward once for each micro-batch.

    Args:
        graph: the model.
        decisions: the plan.
        units: sizes of its units, in its order.
        profile: of the graph, with the plan's recomputing modules.
        clips: gradients are clipped before the optimizer's step.
        has_gradients: gradients of the step before are there, filled with zeros.

    Raises:
        RequestError: the profile is of other recomputing modules, or the plan has no root unit, or its root does not
            run.
    """
    if decisions.recompute != profile.recompute:
        raise RequestError(
            "recompute", ", ".join(decisions.recompute), f"those of the profile: {', '.join(profile.recompute)}"
        )
    if not decisions.units or decisions.units[-1].modules != ("",):
        raise RequestError("units", decisions.units[-1:], "the root as the last unit")
    if "" not in profile.runs:
        raise RequestError("entry", decisions.entry, "a method that runs the root under FSDP2's hooks")
    return tuple(_Replay(graph, decisions, units, profile, has_gradients).run(clips))


class _Replay:
    """One pass over the hooks in the order in which they run."""

    def __init__(
        self,
        graph: ModelGraph,
        decisions: Decisions,
        units: Sequence[UnitSizes],
        profile: StepProfile,
        has_gradients: bool,
    ) -> None:
        self.profile, self.decisions = profile, decisions
        self.groups = [Group(index=index, sizes=sizes) for index, sizes in enumerate(units)]
        self.root = self.groups[-1]
        self.of_module = {module: group for group in self.groups for module in group.sizes.modules}
        self.states = self._all_states(graph)
        self.order: list[Group] = []
        self.backward_hooks: list[tuple[tuple[int, int, int], Callable[[], None]]] = []
        self.replay_root: Group | None = None
        self.num_inputs_alive = 0
        self.is_reducing = False
        self.is_synced = True
        self.micro_batch = self.position = self.num_born = 0
        self.phase: Phase = "forward"
        self.owner = {key: group for group in self.groups for key in group.sizes.keys}
        self.births = [(moment.born, moment.key) for moment in profile.gradients]
        self.merges: list[tuple[int, str]] = []
        self.averaged = tuple(averaged_bytes(Tree.of(graph), decisions))
        self.events: list[Event] = []
        if has_gradients:
            for moment in profile.gradients:
                if moment.key in self.owner:
                    self.owner[moment.key].reduced.add(moment.key)
            if decisions.reduce_unused:
                for group in self.groups:
                    group.reduced |= {key for key, _ in group.sizes.gradients}
        self.has_gradients = has_gradients

    def _all_states(self, graph: ModelGraph) -> list[Group]:
        """``all_states``: pre-order of the tree by the first member, each unit once."""
        found = (self.of_module[node.fqn] for node in graph.modules if node.fqn in self.of_module)
        return list({group.index: group for group in found}.values())

    def run(self, clips: bool) -> list[Event]:
        last = self.decisions.micro_batches - 1
        for self.micro_batch in range(last + 1):
            self.is_synced = self.decisions.gradient_sync == "every" or self.micro_batch == last
            self._begin()
            self.phase = "forward"
            if self.micro_batch:
                self._event("next inputs")
            self._forward()
            self.phase = "backward"
            self._backward()
        self.phase = "optimizer"
        if clips:
            self._event("clip")
        self._event("optimizer")
        self._event("zero grad")
        return self.events

    def _begin(self) -> None:
        """Back to the first op; which gradients are there already stays known."""
        self.position = self.num_born = 0
        self.order, self.backward_hooks = [], []
        for group in self.groups:
            group.training, group.places, group.waiting = "idle", [], []
        merges = []
        for moment in self.profile.gradients:
            if moment.key in self.owner:
                owner = self.owner[moment.key]
                owner.waiting.append(moment)
                is_there = moment.key in owner.kept and not owner.sizes.is_kept_in_other_dtype
            else:
                is_there = self.micro_batch > 0 or self.has_gradients
            if is_there:
                merges.append((moment.handed + 1, moment.key))
        self.merges = sorted(merges)

    # -- forward

    def _forward(self) -> None:
        for at, is_entry, run, module in self._forward_hooks():
            self._compute(at)
            if is_entry:
                self._pre_forward(module, run)
            else:
                self._post_forward(module, run)
        self._compute(self.profile.num_forward)

    def _forward_hooks(self) -> Iterator[tuple[int, bool, ModuleRun, str]]:
        """(position, is it an entry, run, module), nested as the calls were."""
        runs = [(run, module) for module in self.of_module for run in self.profile.runs.get(module, ())]
        stack: list[tuple[ModuleRun, str]] = []
        for run, module in sorted(runs, key=lambda item: item[0].rank):
            while stack and not _is_inside(run, stack[-1][0]):
                done, name = stack.pop()
                yield done.forward[1], False, done, name
            yield run.forward[0], True, run, module
            stack.append((run, module))
        while stack:
            done, name = stack.pop()
            yield done.forward[1], False, done, name

    def _pre_forward(self, module: str, run: ModuleRun) -> None:
        group = self.of_module[module]
        if not group.to_run:
            group.to_run = set(group.sizes.modules)
        is_first = group.training != "forward"
        group.training = "forward"
        if not group.has_params:
            return
        self._event("hook", group)
        self._gather(group)
        self._wait(group, is_deferred=True)
        if is_first and run.inputs_need_grad and run.backward is not None:
            # ``RegisterPostBackwardFunction``: at one position the ends of inner modules come first.
            self._in_backward(run.backward[1], _POST_BACKWARD, -run.rank, self._post_backward, group)

    def _post_forward(self, module: str, run: ModuleRun) -> None:
        group = self.of_module[module]
        if module in group.to_run:
            group.to_run.discard(module)
            if not group.to_run:
                self._complete_forward(group, run)
        if group is self.root:
            for state in reversed(self.states):
                # ``_force_complete_incomplete_states``: its hook stands on the root's output.
                if state is not group and state.to_run:
                    self._complete_forward(state, run)
                    state.to_run.clear()
            self._event("flush", group)

    def _complete_forward(self, group: Group, run: ModuleRun) -> None:
        group.training = "idle"
        if run.output_needs_grad and run.backward is not None:
            # At one position the hook of the inner module was registered first on the same tensor.
            self._in_backward(run.backward[0], _PRE_BACKWARD, -run.rank, self._pre_backward, group)
        if not group.has_params:
            return
        if group.sizes.reshard:
            self._reshard(group)
        group.places.append(len(self.order))
        self.order.append(group)

    # -- backward

    def _in_backward(self, at: int, turn: int, tie: int, hook: Callable[..., None], *subject: Group | str) -> None:
        self.backward_hooks.append(((at, turn, tie), partial(hook, *subject)))

    def _backward(self) -> None:
        for module in self.of_module:
            for first, stop in self.profile.replays.get(module, ()):
                self._in_backward(first, _REPLAY, first - stop, self._pre_forward_again, module)
                self._in_backward(stop, _REPLAYED, stop - first, self._post_forward_again, module)
        for (at, _, _), hook in sorted(self.backward_hooks, key=lambda item: item[0]):
            self._compute(at)
            hook()
        self._compute(self.profile.num_ops)
        self._final_callback()
        for dtype in self.averaged:
            self._event("average", key=dtype)

    def _pre_forward_again(self, module: str) -> None:
        """``_pre_forward`` of a module that runs again: a unit inside the recomputed part is gathered as in forward."""
        group = self.of_module[module]
        if group.training == "pre-backward":
            self._gather(group)
            self._wait(group, is_deferred=False)
            return
        if self.replay_root is None:
            self.replay_root = group
        group.training = "forward"
        self._event("hook", group)
        self._gather(group)
        self._wait(group, is_deferred=True)

    def _post_forward_again(self, module: str) -> None:
        """``_post_forward`` during backward: it does not reshard, nor count for the prefetch order."""
        group = self.of_module[module]
        if group.training == "forward":
            group.training = "idle"
        if group is self.replay_root:
            self.replay_root = None
            self._event("flush", group)

    def _pre_backward(self, group: Group) -> None:
        if not group.has_params or group.training == "pre-backward":
            return
        group.training = "pre-backward"
        self._event("hook", group)
        self._gather(group)
        self._wait(group, is_deferred=False)
        if group.places:
            place = group.places.pop()
            if place > 0:
                self._gather(self.order[place - 1])

    def _post_backward(self, group: Group) -> None:
        if not group.has_params:
            return
        group.training = "post-backward"
        keys = {moment.key for moment in group.waiting if moment.complete < self.position}
        group.waiting = [moment for moment in group.waiting if moment.key not in keys]
        if group.kept and group.sizes.is_kept_in_other_dtype and keys & group.kept:
            # ``accumulate_unsharded_grad_if_needed``
            self._event("merge", group, keys=tuple(sorted(keys & group.kept)))
        if not self.is_synced:
            self._keep(group, keys)
            return
        are_kept = bool(group.kept) and group.sizes.is_kept_in_other_dtype
        keys |= group.kept
        group.kept = set()
        unused: set[str] = set()
        if self.decisions.reduce_unused:
            unused = {key for key, _ in group.sizes.gradients} - keys
        reduction = group.sizes.reduction(keys, unused, are_kept=are_kept) if group.was_gathered else None
        self._reshard(group, reduction)
        if self.num_inputs_alive:
            self._event("release", group)
            self.num_inputs_alive -= 1
        if reduction is None:
            return
        self._settle(group)
        is_accumulated = keys | unused <= group.reduced
        self._event("reduce", group, reduction=reduction, is_accumulated=is_accumulated)
        group.reduced |= keys | unused
        self.num_inputs_alive += 1
        self.is_reducing = True
        if self.decisions.num_devices > self.decisions.num_shards and (reduction.is_cast or is_accumulated):
            group.holds_reduced = reduction

    def _keep(self, group: Group, keys: set[str]) -> None:
        """``post_backward`` without ``reduce_grads``: the whole gradients stay for the next micro-batch."""
        self._reshard(group)
        new = keys - group.kept
        if new and group.sizes.is_kept_in_other_dtype:
            # ``to_accumulated_grad_if_needed``
            self._event("keep", group, keys=tuple(key for key, _ in group.sizes.gradients if key in new))
        group.kept |= new

    def _settle(self, group: Group) -> None:
        """``_all_reduce_state = None``: the buffer of the unit's last all-reduce is freed."""
        if group.holds_reduced is not None:
            self._event("settle", group, reduction=group.holds_reduced)
            group.holds_reduced = None

    def _final_callback(self) -> None:
        """``_root_post_backward_final_callback``: what is left, unit by unit; each waits for all reductions so far."""
        for group in self.states:
            if not group.has_params:
                continue
            if group.training != "post-backward":
                self._post_backward(group)
            if self.is_reducing:
                self._event("finish", group)
                self.is_reducing = False
            self._settle(group)
            if group.is_pending:
                # A prefetch that nobody waited for.
                self._event("settle", group, drops_gather=True)
                group.is_pending = False
        for _ in range(self.num_inputs_alive):
            self._event("release", self.root)
        self.num_inputs_alive = 0

    # -- both

    def _gather(self, group: Group) -> None:
        if not group.has_params or group.is_pending or group.is_unsharded:
            return
        group.is_pending = True
        self._event("gather", group)

    def _wait(self, group: Group, is_deferred: bool) -> None:
        if not group.is_pending:
            return
        group.is_pending, group.is_unsharded, group.was_gathered = False, True, True
        self._event("copy out", group, is_deferred=is_deferred)

    def _reshard(self, group: Group, reduction: Reduction | None = None) -> None:
        if group.is_unsharded or reduction is not None:
            self._event("reshard", group, reduction=reduction, is_unsharded=group.is_unsharded)
            group.is_unsharded = False

    def _compute(self, until: int) -> None:
        """Ops up to a position."""
        if until <= self.position:
            return
        first = self.num_born
        while self.num_born < len(self.births) and self.births[self.num_born][0] < until:
            self.num_born += 1
        born = tuple(self.births[first : self.num_born])
        merged = tuple(merge for merge in self.merges if self.position < merge[0] <= until) if self.merges else ()
        start, self.position = self.position, until
        event = Event(
            kind="compute",
            phase=self.phase,
            start=start,
            stop=until,
            gradients=born,
            merged=merged,
            micro_batch=self.micro_batch,
        )
        self.events.append(event)

    def _event(self, kind: Kind, group: Group | None = None, **subject: Any) -> None:
        at = self.position
        unit = -1 if group is None else group.index
        self.events.append(
            Event(kind=kind, phase=self.phase, unit=unit, start=at, stop=at, micro_batch=self.micro_batch, **subject)
        )


def _is_inside(run: ModuleRun, outer: ModuleRun) -> bool:
    return run.forward[0] < outer.forward[1]
