"""What a step runs where its questions are answered otherwise.

Ranks that draw other random numbers, or see other data, may run other modules than the captured step did, and a unit
that only some ranks run makes the others wait forever. Whether a model asks such questions is seen while its step is
traced. Only then is its forward run again, on fake tensors and without a record of the ops, once for each other set of
answers; what it runs is compared. A run that fails tells nothing, since such answers may never come: ``assert`` and
``raise`` are questions too.
"""

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from autoshard.capture.answers import Answers, Origin
from autoshard.capture.attention import TargetFunctions
from autoshard.capture.fake import FakeMode, FakeModel
from autoshard.capture.inputs import Pair, fake_pair
from autoshard.capture.libraries import as_in_training
from autoshard.capture.ops import READS_NO_DATA, facts_of, run_op, tensors_of
from autoshard.capture.outline import Alike, Count, Skips
from autoshard.capture.quiet import quiet_machine
from autoshard.capture.spans import ModuleStack
from autoshard.capture.storages import StorageLog
from autoshard.capture.tree import ModuleTree
from autoshard.capture.values import Values, may_keep

LONGEST = 4
"""A run that takes more ops than so many times the usual one is ended: a loop depends on what was answered."""
LEAST_OPS = 2000

LOW, HIGH = 0.0, 1.0 - 2.0**-24
"""The outermost coins: one falls below every threshold, the other above."""


class _TooLong(Exception):
    """The run goes on much longer than the usual one."""


@dataclass(frozen=True, slots=True)
class Way:
    """What one run of the forward did.

    Attributes:
        modules: FQNs of the modules in the order of their runs.
        params: keys of the parameters that were read.
        digest: of its ops and their arguments, empty if they were not looked at.
    """

    modules: tuple[str, ...]
    params: frozenset[str]
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Uncertain:
    """What depends on the answers.

    Attributes:
        modules: FQNs of the modules that run more or less often, or in another order, by the trait that says why.
        params: keys of the parameters that are read with some answers only.
    """

    modules: dict[str, frozenset[str]]
    params: frozenset[str]


BY_CHANCE = "by-chance"
TRAITS = {Origin.CHANCE: BY_CHANCE, Origin.INPUTS: "by-value", Origin.DATA: "by-value"}
"""Traits of modules by whose answers decide about them."""

_SETS: dict[Origin, tuple[Callable[[], Answers], ...]] = {
    Origin.CHANCE: (
        lambda: Answers(coin=LOW, seed=1),
        lambda: Answers(coin=HIGH, seed=2),
        lambda: Answers(coin=LOW, seed=3),
    ),
    Origin.INPUTS: (
        lambda: Answers(origin=Origin.INPUTS, way="other"),
        lambda: Answers(origin=Origin.INPUTS, way="alternating"),
    ),
    Origin.DATA: (
        lambda: Answers(origin=Origin.DATA, way="other"),
        lambda: Answers(origin=Origin.DATA, way="alternating"),
    ),
}


def uncertain(
    model: nn.Module,
    tree: ModuleTree,
    pair: Pair,
    usual: Way,
    asked: Origin,
    num_ops: int,
    *,
    entry: str,
    dtype: torch.dtype | None,
    device_kind: str,
    alike: dict[str, Alike] | None = None,
) -> Uncertain:
    """What depends on the answers that a traced step asked for.

    Args:
        model: the root.
        tree: its tree.
        pair: arguments of the entry.
        usual: what the traced step did.
        asked: whose answers it asked for.
        num_ops: ops of its forward.
        entry: the root's method to run.
        dtype: dtype of floating point parameters and inputs.
        device_kind: ``cuda`` or ``cpu``.
        alike: blocks that were replayed; two of each form run, the others are taken to do the same.
    """
    found: dict[str, set[str]] = {}
    params: set[str] = set()
    budget = max(LEAST_OPS, LONGEST * num_ops)
    with_params = {fqn for fqn in tree.modules if _holds_params(tree, fqn)}
    for origin, sets in _SETS.items():
        for make in sets if origin & asked else ():
            other = run_forward(
                model, tree, pair, make(), budget, entry=entry, dtype=dtype, device_kind=device_kind, alike=alike
            )
            if other is None:
                continue
            differ = differing(
                [fqn for fqn in usual.modules if fqn in with_params],
                [fqn for fqn in other.modules if fqn in with_params],
            )
            for fqn in differ:
                found.setdefault(fqn, set()).add(TRAITS[origin])
            params |= usual.params ^ other.params
    return Uncertain({fqn: frozenset(traits) for fqn, traits in found.items()}, frozenset(params))


def differing(usual: Sequence[str], other: Sequence[str]) -> set[str]:
    """Names that stand a different number of times in two sequences, and those whose order is another.

    Examples:
        >>> sorted(differing(["a", "b", "c"], ["a", "c"]))
        ['b']
        >>> sorted(differing(["a", "b", "c"], ["a", "c", "b"]))
        ['b', 'c']
    """
    first, second = Counter(usual), Counter(other)
    found = {name for name in first | second if first[name] != second[name]}
    left = [name for name in usual if name not in found]
    right = [name for name in other if name not in found]
    for one, two in zip(left, right, strict=True):
        if one != two:
            found |= {one, two}
    return found


def _holds_params(tree: ModuleTree, fqn: str) -> bool:
    entry = tree.modules[fqn]
    return bool(entry.params) or any(_holds_params(tree, child) for child in entry.children)


def run_forward(
    model: nn.Module,
    tree: ModuleTree,
    pair: Pair,
    answers: Answers,
    budget: int,
    *,
    entry: str,
    dtype: torch.dtype | None,
    device_kind: str,
    replaces_draws: bool = True,
    alike: dict[str, Alike] | None = None,
) -> Way | None:
    """One forward with these answers; ``None`` if it fails. Its digest does not count blocks that were left out."""
    mode, log, values = FakeMode(), StorageLog(), Values(answers)
    stack = ModuleStack(tree, log)
    with quiet_machine(answers.seed), FakeModel(tree, mode, dtype) as fake:
        for key, param in fake.params.items():
            log.add_param(key, param)
        for twin, original in fake.buffers:
            if may_keep(original) and original.device.type == "cpu":
                values.set(twin, original.detach().clone())
        (args, kwargs), _ = fake_pair(pair, mode, values, dtype)
        if not model.training:
            model.train()
        count = Count(set(), budget)
        steps = _Steps(log, stack, values, count)
        if alike:
            stack.outliner = Skips(alike, stack, values, count, mode)
        try:
            with (
                torch.enable_grad(),
                as_in_training(),
                torch.compiler.set_stance("force_eager"),
                _drawing(answers.coin) if replaces_draws else nullcontext(),
                stack.watching(),
                mode,
                TargetFunctions(device_kind, values),
                steps,
            ):
                model(*args, **kwargs) if entry == "forward" else stack.run_entry(getattr(model, entry), args, kwargs)
        except _TooLong:
            pass  # what ran so far ran more often than usual
        except Exception:
            return None
        finally:
            stack.outliner = None  # it refers to all that refers to it
        return Way(tuple(span.module for span in stack.spans), frozenset(count.read), steps.digest.hexdigest())


class _Steps(TorchDispatchMode):
    """Runs ops, counts them, and notes which parameters they read."""

    def __init__(self, log: StorageLog, stack: ModuleStack, values: Values, count: Count) -> None:
        super().__init__()
        self._log, self._stack, self._values, self._count = log, stack, values, count
        self.digest = hashlib.blake2b(digest_size=8)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as for FakeMode

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one op."""
        with torch._C.DisableTorchFunction():
            kwargs = kwargs or {}
            if func.namespace == "prim" or self._count.is_paused:
                return func(*args, **kwargs)
            self._count.left -= 1
            if self._count.left < 0:
                raise _TooLong
            facts = facts_of(func)
            self.digest.update(repr((facts.target, _plain((args, kwargs)))).encode())
            if not facts.is_view and facts.name not in READS_NO_DATA:
                for tensor in tensors_of(args, kwargs):
                    key = self._log.param_keys.get(tensor.untyped_storage()._cdata) if _is_strided(tensor) else None
                    if key is not None:
                        self._count.read.add(key)
            span, _ = self._stack.place()
            return run_op(func, args, kwargs, self._values, span.module if span is not None else "")


def _plain(value: Any) -> Any:
    """Arguments of an op with each tensor as its shape and dtype."""
    return tree_map_only(torch.Tensor, lambda tensor: (tuple(tensor.shape), str(tensor.dtype)), value)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


@contextmanager
def watching_python(answers: Answers) -> Iterator[None]:
    """Notes in ``answers`` if Python's or numpy's random numbers are drawn."""
    numpy = sys.modules.get("numpy")

    def state() -> Any:
        return random.getstate(), None if numpy is None else numpy.random.get_state()[2:]

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            answers.asked |= Origin.CHANCE
            return original(*args, **kwargs)

        return draw

    before = state()
    with (
        mock.patch.object(random.Random, "random", noting(random.Random.random)),
        mock.patch.object(random.Random, "_randbelow", noting(vars(random.Random)["_randbelow"])),
    ):
        yield
    if state() != before:
        answers.asked |= Origin.CHANCE
        answers.draws_in_python = True


@contextmanager
def _drawing(coin: float) -> Iterator[None]:
    """Python's and numpy's single random numbers between 0 and 1 are ``coin``, and choices are the outermost one."""
    is_low = coin < 0.5

    def one(*_: Any) -> float:
        return coin

    def below(self: random.Random, size: int, *_: Any) -> int:
        return 0 if is_low else size - 1

    def between(low: float, high: float, *_: Any) -> float:
        return low + (high - low) * coin

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(random.Random, "random", one))
        patches.enter_context(mock.patch.object(random.Random, "_randbelow", below))
        patches.enter_context(mock.patch.object(random, "random", one))
        patches.enter_context(mock.patch.object(random, "uniform", between))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            for name in ("rand", "random", "random_sample"):
                original = getattr(numpy.random, name)
                patches.enter_context(mock.patch.object(numpy.random, name, _one(coin, original)))
        yield


def _one(coin: float, original: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if args or kwargs else coin

    return draw
