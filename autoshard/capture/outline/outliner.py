"""Which blocks are replayed: decided at each call of a module that has enough likes.

A block is recorded at its first call, and so are a second and the last of its likes, whose recordings must be the
same. Whatever shows that a block is more than its result (a changed attribute, a leaked tensor, a hook) puts all its
likes among those that are traced in full, with the reason; where that shows too late, the step is traced again.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from autoshard.capture.fake import FakeModel, fake_tensor
from autoshard.capture.outline.alone import Machine, record
from autoshard.capture.outline.arguments import Layout, flatten, layouts, unflatten
from autoshard.capture.outline.pairing import HOOKS, Pairer, Pairing, submodules
from autoshard.capture.outline.places import Places
from autoshard.capture.outline.recording import Recording, differences
from autoshard.capture.outline.replay import Replay
from autoshard.capture.outline.script import Script
from autoshard.capture.refusals import Different, NotAsOutlined, NotReplayable, ReadsItsPlace
from autoshard.capture.spans import ModuleStack
from autoshard.capture.structure import placement_attributes
from autoshard.capture.tracer import Tracer
from autoshard.capture.tree import ModuleTree, has_forward
from autoshard.capture.values import KnownValue, Values, may_keep
from autoshard.ir import Outline

MIN_LIKES = 5
"""Blocks of one form in one scope from which on they are replayed: three are traced in any case."""


MAX_RESTARTS = 6
"""Traces that may turn out to have replayed what cannot be; then nothing is replayed."""


class Alike(NamedTuple):
    """What a replayed block shares with the first of its likes: names of its own by those of that one.

    Attributes:
        first: FQN of the first.
        modules: FQNs.
        params: parameter keys.
    """

    first: str
    modules: dict[str, str]
    params: dict[str, str]


class Outlines:
    """What is known of the blocks of one model before and between traces.

    Attributes:
        digests: digest of each module's structure.
        refused: why blocks of a form are traced in full, by digest.
        replayed: how many blocks were replayed from the recording of which one.
        alike: what was replayed in the last trace, by FQN.
        likes: FQNs by digest, in the order of the tree.
        off_reason: why no block is replayed at all, empty if some may be.
    """

    def __init__(self, tree: ModuleTree, digests: dict[str, str]) -> None:
        self.tree, self.digests = tree, digests
        self.placements = placement_attributes(tree)
        self.refused: dict[str, str] = {}
        self.replayed: Counter[str] = Counter()
        self.alike: dict[str, Alike] = {}
        self.likes: dict[str, list[str]] = defaultdict(list)
        for fqn in tree.modules:
            self.likes[digests[fqn]].append(fqn)
        self._inside: dict[str, frozenset[str]] = {}
        self._num_restarts = 0
        self.off_reason = "hooks hang on all modules" if _has_global_hooks() else ""

    def candidates(self, scope: str) -> frozenset[str]:
        """Digests of the blocks that may be replayed inside the module ``scope``, none of them inside another."""
        digest = self.digests[scope]
        found = self._inside.get(digest)
        if found is None:
            found = self._inside[digest] = self._find(scope)
        return found

    def refuse(self, digest: str, reason: str) -> None:
        """Blocks of this form are traced in full from now on; after too many such finds, all blocks are."""
        self.refused[digest] = reason
        self._restarted()

    def refuse_holders(self, key: str) -> None:
        """This parameter is read outside a replayed block: what holds it is traced in full."""
        holder = self.tree.params[key].holders[0]
        while holder:
            self.refused.setdefault(self.digests[holder], f"its parameter {key} is read outside")
            holder = self.tree.modules[holder].parent
        self._restarted()

    def turn_off(self, reason: str) -> None:
        """From now on every block is traced in full."""
        self.off_reason = reason
        self.replayed.clear()
        self.alike.clear()

    def described(self) -> tuple[Outline, ...]:
        """How the blocks were traced, in the order of the tree."""
        found = [
            Outline(module=fqn, num_blocks=len(self.likes[self.digests[fqn]]), num_replayed=num)
            for fqn, num in self.replayed.items()
        ]
        for digest, reason in self.refused.items():
            likes = self.likes[digest]
            found.append(Outline(module=likes[0], num_blocks=len(likes), num_replayed=0, reason=reason))
        if self.off_reason:
            found.append(Outline(module="", num_blocks=1, num_replayed=0, reason=self.off_reason))
        places = {fqn: place for place, fqn in enumerate(self.tree.modules)}
        return tuple(sorted(found, key=lambda outline: (places[outline.module], outline.num_replayed)))

    def _restarted(self) -> None:
        self._num_restarts += 1
        if self._num_restarts >= MAX_RESTARTS:
            self.turn_off(f"{MAX_RESTARTS} forms of blocks turned out not to be replayable")

    def _find(self, scope: str) -> frozenset[str]:
        """The outermost blocks of which there are enough; those inside another are not counted."""
        found: set[str] = set()
        dropped: set[str] = set()
        while True:
            counts = self._counted(scope, found)
            new = next((d for d, num in counts.items() if num >= MIN_LIKES and d not in found | dropped), None)
            few = {digest for digest in found if counts[digest] < MIN_LIKES}
            if few:  # an outer block that was found later holds most of them
                found -= few
                dropped |= few
            elif new is None:
                return frozenset(found)
            elif self._is_block(self.likes[new][0]):
                found.add(new)
            else:
                dropped.add(new)

    def _counted(self, scope: str, found: set[str]) -> Counter[str]:
        """Modules by digest, in the order of the tree, without those inside of blocks that were found."""
        counts: Counter[str] = Counter()
        stack = [*reversed(self.tree.modules[scope].children)]
        while stack:
            fqn = stack.pop()
            counts[self.digests[fqn]] += 1
            if self.digests[fqn] not in found:
                stack += reversed(self.tree.modules[fqn].children)
        return counts

    def _is_block(self, fqn: str) -> bool:
        entry = self.tree.modules[fqn]
        return bool(entry.children) and has_forward(entry.module)


class Outliner:
    """Decides for one trace.

    Args:
        outlines: what is known of the model's blocks.
        machine: what traces.
    """

    def __init__(self, outlines: Outlines, machine: Machine) -> None:
        self._outlines, self._machine = outlines, machine
        self._scope = ""
        self._pairer = Pairer(outlines.tree, outlines.placements, _SameValues(machine.fake))
        self._first: dict[str, list[str]] = defaultdict(list)
        self._pairings: dict[tuple[str, str], Pairing | None] = {}
        self._scripts: dict[tuple[Any, ...], Script] = {}
        outlines.replayed.clear()
        outlines.alike.clear()

    def may_replay(self, fqn: str) -> bool:
        """Worth asking for this module now."""
        outlines = self._outlines
        digest = outlines.digests[fqn]
        return (
            digest in outlines.candidates(self._scope)
            and digest not in outlines.refused
            and self._machine.stack.log.phase == "forward"
            and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            and not torch.is_autocast_enabled("cpu")
            and not torch.is_autocast_enabled("cuda")
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    def call(
        self, fqn: str, module: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Whether the call was written down from a recording, and its result."""
        outlines = self._outlines
        digest = outlines.digests[fqn]
        log = self._machine.stack.log
        try:
            self._require_plain(fqn, module, log.replayed_modules)
            form, tensors = flatten((args, kwargs))
            given = layouts(tensors, self._machine.digest)
        except NotReplayable as reason:
            outlines.refused[digest] = str(reason)
            return False, None
        first = self._representative(fqn, digest, module)
        key = (first, form, given, torch.is_grad_enabled())
        script = self._scripts.get(key)
        known = [self._machine.values.known(tensor) for tensor in tensors]
        if script is None:
            try:
                script = self._scripts[key] = self._recorded(first, digest, form, given, known)
            except (ReadsItsPlace, Different) as reason:
                outlines.refused[digest] = str(reason)
                return False, None
            except NotReplayable as reason:
                raise NotAsOutlined(digest, str(reason)) from None
            except Exception as error:
                raise NotAsOutlined(digest, f"it does not run alone ({type(error).__name__})") from None
        pairing = self._pairing(first, fqn)
        if any(pairing.params[key] in self._machine.tracer.readers for key in script.recording.params):
            raise NotAsOutlined(digest, "its parameters are read outside as well")
        replay = Replay(self._machine, script, pairing, digest, self._renewer(first, digest, form, given, known))
        results = replay.forward(tensors, given)
        outlines.replayed[first] += 1
        outlines.alike[fqn] = Alike(first, pairing.modules, pairing.params)
        return True, unflatten(script.recording.form, results)

    def _require_plain(self, fqn: str, module: nn.Module, replayed: set[str]) -> None:
        if fqn in replayed:
            raise NotAsOutlined(self._outlines.digests[fqn], "it is called more than once")
        for part in submodules(module):
            if isinstance(part, torch.jit.ScriptModule):
                raise NotReplayable("it is a script")
            if any(getattr(part, hooks) for hooks in HOOKS):
                raise NotReplayable(f"a hook hangs on {self._outlines.tree.fqn_of[id(part)]}")
            for key in self._outlines.tree.keys_on(part):
                holders = self._outlines.tree.params[key].holders
                if len(holders) > 1 and not all(self._is_inside(holder, fqn) for holder in holders):
                    raise NotReplayable(f"its parameter {key} is tied to one outside")

    def _is_inside(self, fqn: str, outer: str) -> bool:
        while fqn != outer and fqn:
            fqn = self._outlines.tree.modules[fqn].parent
        return fqn == outer

    def _representative(self, fqn: str, digest: str, module: nn.Module) -> str:
        for first in self._first[digest]:
            if first == fqn or self._pairing_or_none(first, fqn) is not None:
                return first
        self._first[digest].append(fqn)
        return fqn

    def _pairing_or_none(self, first: str, fqn: str) -> Pairing | None:
        """What stands for what in two blocks, ``None`` if they are not alike."""
        if (first, fqn) not in self._pairings:
            module = self._outlines.tree.module
            try:
                found = self._pairer.pair(module(first), module(fqn))
            except Different:  # not kept: its traceback would keep the arguments of the call alive
                found = None
            self._pairings[first, fqn] = found
        return self._pairings[first, fqn]

    def _pairing(self, first: str, fqn: str) -> Pairing:
        found = self._pairing_or_none(first, fqn)
        assert found is not None
        return found

    def _recorded(
        self,
        first: str,
        digest: str,
        form: Any,
        given: tuple[Layout, ...],
        known: Sequence[KnownValue | None],
        incoming: tuple[Layout, ...] | None = None,
    ) -> Script:
        """The recording of a block, after a second and the last of its likes were recorded to the same effect."""
        recording = self._record(first, form, given, known, incoming)
        if incoming is None:
            likes = [fqn for fqn in self._outlines.likes[digest] if fqn != first]
            others = [fqn for fqn in (*likes[:1], *likes[-1:]) if self._pairing_or_none(first, fqn) is not None]
            for other in dict.fromkeys(others):
                second = self._record(other, form, given, known, incoming)
                differing = differences(recording, second, self._pairing(first, other))
                if differing:
                    raise Different(f"{other} does something else than {first}: other {differing}")
        return Script(recording)

    def _record(
        self,
        fqn: str,
        form: Any,
        given: Sequence[Layout],
        known: Sequence[KnownValue | None],
        incoming: tuple[Layout, ...] | None,
    ) -> Recording:
        module = self._outlines.tree.module(fqn)
        before, self._scope = self._scope, fqn
        try:
            return record(self._machine, fqn, module, self._machine.stack.hooked(module), form, given, known, incoming)
        finally:
            self._scope = before

    def _renewer(
        self, first: str, digest: str, form: Any, given: tuple[Layout, ...], known: Sequence[KnownValue | None]
    ) -> Callable[[tuple[Layout, ...]], Recording]:
        is_enabled = torch.is_grad_enabled()

        def renewed(incoming: tuple[Layout, ...]) -> Recording:
            key = (first, form, given, is_enabled, incoming)
            script = self._scripts.get(key)
            if script is None:
                with ExitStack() as modes:
                    modes.enter_context(torch.set_grad_enabled(is_enabled))
                    modes.enter_context(self._machine.tracer.resumed())
                    script = self._recorded(first, digest, form, given, known, incoming)
                self._scripts[key] = script
            return script.recording

        return renewed


def make_outliner(
    outlines: Outlines, mode: FakeTensorMode, stack: ModuleStack, tracer: Tracer, values: Values, fake: FakeModel
) -> Outliner:
    """The outliner of one trace.

    Args:
        outlines: what is known of the model's blocks.
        mode: in which tensors are fake.
        stack: follows the modules.
        tracer: writes down the ops.
        values: the known values.
        fake: the model's fake tensors.
    """
    leaf = fake_tensor(mode, torch.empty(0, device="meta")).requires_grad_()
    machine = Machine(
        stack=stack,
        tracer=tracer,
        values=values,
        fake=fake,
        leaf=leaf,
        digest=ValueDigests(values),
        places=Places(outlines.placements),
    )
    return Outliner(outlines, machine)


class ValueDigests:
    """Digests of the known values of tensors, each value read once."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._known: dict[int, tuple[torch.Tensor, str]] = {}

    def __call__(self, tensor: torch.Tensor) -> str | None:
        """A text that is equal for equal values; ``None`` if the value is not known."""
        value = self._values.get(tensor)
        if value is None:
            return None
        found = self._known.get(id(value))
        if found is None or found[0] is not value:
            with _disable_current_modes():
                content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            found = self._known[id(value)] = (value, f"{digest} {value.dtype}{tuple(value.shape)}")
        return f"{found[1]} {self._values.origin((tensor,)).value}"


class _SameValues:
    """Whether two of the model's tensors have the same values, where values are known at all."""

    def __init__(self, fake: FakeModel) -> None:
        self._originals = {id(twin): original for twin, original in fake.buffers}

    def __call__(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        left, right = (self._originals.get(id(tensor)) for tensor in (one, other))
        if left is None or right is None:
            return left is right
        has_values = [may_keep(tensor) and tensor.device.type == "cpu" for tensor in (left, right)]
        if not all(has_values):
            return not any(has_values)
        with _disable_current_modes():
            return torch.equal(left, right)


def _has_global_hooks() -> bool:
    hooks = torch.nn.modules.module
    return any(
        getattr(hooks, name)
        for name in (
            "_global_forward_hooks",
            "_global_forward_pre_hooks",
            "_global_backward_hooks",
            "_global_backward_pre_hooks",
        )
    )
