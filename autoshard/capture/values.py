"""Answers to the questions that a model asks of its data, although fake tensors have none.

Small integer and bool tensors that come from the example inputs keep their real value beside the fake, and each op on
such tensors is run on the values too: ``ids == image_token``, ``mask.all()`` and ``sizes.tolist()`` are then exact.
Where no value is known, a data-dependent op is *concretised* by an assumption, which is noted: every element is
selected, a bool is true, a number is 1. A single random number (a coin, as for dropping whole layers) is 0.5, and
nothing is NaN or infinite. Of each known value it is kept whether another rank may have another one there: because it
was drawn, or because it stands in the inputs.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from autoshard.capture.answers import MANY, Answers, Origin

aten = torch.ops.aten

MAX_INT_NUMEL = 1 << 20
"""Integer and bool tensors up to this size keep their value."""
MAX_FLOAT_NUMEL = 1 << 20
"""Floating point results of integer computations up to this size keep theirs."""

FACTORIES = {
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default, aten.zeros.default,
    aten.ones.default, aten.scalar_tensor.default, aten.tril_indices.default, aten.triu_indices.default,
    aten.linspace.default, aten.eye.default, aten.eye.m, aten.empty.memory_format,
}  # fmt: skip
SIZED = {aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format}
"""Factories whose first argument is the shape: what is too large to keep is not made."""
COINS = {"rand", "rand_like", "uniform_", "uniform"}
DRAWS = COINS | {
    "bernoulli", "bernoulli_", "exponential_", "geometric_", "multinomial", "normal", "normal_", "poisson", "randint",
    "randint_like", "randn", "randn_like", "random_", "randperm",
}  # fmt: skip
"""Ops that draw random numbers."""
DRAWN = {"randint", "randperm"}
"""Those whose numbers are drawn indeed, where they are few."""
MAX_DRAWN = 4096
NEVER_TRUE = {aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default}


def _overloads(*names: str) -> set[torch._ops.OpOverload]:
    packets = [getattr(aten, name) for name in names if hasattr(aten, name)]
    return {getattr(packet, overload) for packet in packets for overload in packet.overloads()}


DATA_DEPENDENT = _overloads("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount") | {
    aten.repeat_interleave.Tensor
}
"""Ops whose output shape depends on data."""
COMPARISONS = {aten.equal.default, aten.allclose.default}
"""Ops that answer with a Python bool."""
MASKED = {aten.index.Tensor}


class KnownValue(NamedTuple):
    """What is known of a fake tensor.

    Attributes:
        value: its data.
        origin: where that comes from.
    """

    value: torch.Tensor
    origin: Origin


class Values:
    """The known values of fake tensors.

    Attributes:
        answers: what is answered where no value is known.
        assumed: (module, op, what was assumed) for each concretised op, once.
    """

    def __init__(self, answers: Answers | None = None) -> None:
        self.answers = Answers() if answers is None else answers
        self._values: dict[int, tuple[weakref.ref, torch.Tensor, Origin]] = {}
        self._by_storage: dict[int, set[int]] = {}
        self._num_asked: Counter[str] = Counter()
        self.assumed: dict[tuple[str, str, str], None] = {}

    def set(self, fake: torch.Tensor, value: torch.Tensor, origin: Origin = Origin.SAME) -> None:
        """Remember the value of a fake tensor, and where it comes from."""
        number, cdata = id(fake), fake.untyped_storage()._cdata
        self._values[number] = (weakref.ref(fake, lambda _: self._forget_one(number, cdata)), value, origin)
        self._by_storage.setdefault(cdata, set()).add(number)

    def get(self, fake: torch.Tensor) -> torch.Tensor | None:
        """The value of a fake tensor if it is known."""
        entry = self._values.get(id(fake))
        if entry is not None and entry[0]() is fake:
            return entry[1]
        return fake.constant if isinstance(fake, FakeTensor) else None

    def known(self, fake: torch.Tensor) -> KnownValue | None:
        """The value of a fake tensor and where it comes from, if it is known."""
        value = self.get(fake)
        return None if value is None else KnownValue(value, self.origin((fake,)))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What has to be assumed in here is noted in a dictionary of its own, and counted from the beginning."""
        kept = self.assumed, self._num_asked
        self.assumed, self._num_asked = {}, Counter()
        try:
            yield
        finally:
            self.assumed, self._num_asked = kept

    def origin(self, tensors: Iterable[torch.Tensor]) -> Origin:
        """Where the values of tensors come from."""
        found = Origin.SAME
        for tensor in tensors:
            entry = self._values.get(id(tensor))
            if entry is not None:
                found |= entry[2]
        return found

    def forget(self, fake: torch.Tensor) -> None:
        """An op with an unknown result has written to the memory of this tensor."""
        for number in self._by_storage.pop(fake.untyped_storage()._cdata, ()):
            self._values.pop(number, None)

    def _forget_one(self, number: int, cdata: int) -> None:
        self._values.pop(number, None)
        numbers = self._by_storage.get(cdata)
        if numbers is not None:
            numbers.discard(number)
            if not numbers:
                del self._by_storage[cdata]

    def may_know(self, func: torch._ops.OpOverload, tensors: Sequence[torch.Tensor]) -> bool:
        """All the values that the op needs may be known (the quick test that most ops fail)."""
        if not tensors:
            return func in FACTORIES
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                known = self._values.get(id(tensor))
                if known is None and tensor.constant is None:
                    return False
            elif tensor.is_floating_point() and tensor.numel() > MAX_FLOAT_NUMEL:
                return False
        return True

    def evaluate(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The op's result on the known values; ``None`` if it fails on them or is too large to keep."""
        kwargs = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs
        if func in SIZED and math.prod(args[0]) > MAX_INT_NUMEL:
            return None
        args, kwargs = tree_map_only(FakeTensor, self.get, (args, kwargs))
        if not func.is_view and any(map(_is_spread, tree_leaves((args, kwargs)))):
            return None
        try:
            with _disable_current_modes(), torch.no_grad():
                result = func(*args, **kwargs)
                if func is aten.empty.memory_format:
                    result.zero_()  # any value is as good, but the same in every run
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return None
        return result if all(_is_small(leaf) for leaf in tree_leaves(result)) else None

    def keep(self, fakes: Any, values: Any, origin: Origin = Origin.SAME) -> None:
        """Remember the values of an op's results, and where they come from."""
        fakes, values = tree_leaves(fakes), tree_leaves(values)
        if len(fakes) == len(values):
            for fake, value in zip(fakes, values, strict=True):
                if isinstance(fake, FakeTensor) and isinstance(value, torch.Tensor) and fake.shape == value.shape:
                    self.set(fake, value, origin)

    def keep_assumed_results(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """Give coins their value, draw small whole numbers, and say of everything that it is finite."""
        if not isinstance(out, FakeTensor):
            return
        with _disable_current_modes():
            if func._opname in COINS and out.numel() == 1:
                low, high = args[1:3] if func._opname == "uniform_" and len(args) > 2 else (0.0, 1.0)
                coin = low + (high - low) * self.answers.coin
                self.set(out, torch.full(tuple(out.shape), coin, dtype=out.dtype), Origin.CHANCE)
            elif func._opname in DRAWN and out.numel() <= MAX_DRAWN:
                given = {**kwargs, "device": torch.device("cpu"), "pin_memory": None}
                self.set(out, func(*args, **given), Origin.CHANCE)
            elif func in NEVER_TRUE:
                self.set(out, torch.zeros((), dtype=torch.bool).expand(tuple(out.shape)))

    def scalar(self, fake: torch.Tensor, module: str) -> bool | int | float | complex:
        """The number in a one-element tensor, assumed if it is not known."""
        value = self.get(fake)
        if value is not None:
            with _disable_current_modes():
                known = value.item()
            origin = self.origin((fake,))
            return known if isinstance(known, complex) else self._told(known, origin)
        self._num_asked[module] += 1
        if fake.dtype is torch.bool:
            self._note(module, "_local_scalar_dense", "a bool that depends on activations is true")
            return self._told(self._num_asked[module] <= MANY or self._num_asked[module] % 2 == 0, Origin.DATA)
        self._note(module, "_local_scalar_dense", "a number that depends on activations is 1")
        return self._told(1.0 if fake.is_floating_point() else 1, Origin.DATA)

    def _told(self, usual: bool | float, origin: Origin) -> bool | int | float:
        if isinstance(usual, bool):
            return self.answers.boolean(usual, origin)
        return self.answers.number(usual, origin)

    def agree(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], module: str) -> bool:
        """The answer of an op that compares whole tensors, assumed if the values are not known."""
        tensors = [part for part in args if isinstance(part, torch.Tensor)]
        known = self.evaluate(func, args, kwargs) if self.may_know(func, tensors) else None
        if known is None:
            self._note(module, func._opname, "the tensors are equal")
            return self.answers.boolean(True, Origin.DATA)
        return self.answers.boolean(bool(known), self.origin(tensors))

    def is_otherwise(self, tensors: Iterable[torch.Tensor]) -> bool:
        """What is known of these tensors is asked for, and another answer than the known one is wanted."""
        origin = self.origin(tensors)
        self.answers.asked |= origin
        return bool(origin & self.answers.origin) and self.answers.way != "usual"

    def concretised(
        self,
        func: torch._ops.OpOverload,
        args: tuple,
        kwargs: dict[str, Any],
        module: str,
        origin: Origin | None = None,
    ) -> Any:
        """Fake outputs of a data-dependent op without known values: as if it selected every element.

        With ``origin`` its values are known, but others from there are wanted.
        """
        given = args[0]
        count, long = max(1, given.numel()) if given.numel() else 0, torch.long
        name = func._opname
        if name == "bincount":
            size = max(kwargs.get("minlength", args[2] if len(args) > 2 else 0), 1)
            self._note(module, name, f"it has {size} bins")
            weights = args[1] if len(args) > 1 else kwargs.get("weights")
            dtype = long if weights is None else torch.promote_types(weights.dtype, torch.float32)
            return given.new_empty((size,), dtype=dtype)
        self._note(module, name, f"it selects all {count} elements")
        count = self.answers.selected(count, Origin.DATA if origin is None else origin)
        if name == "nonzero":
            return given.new_empty((count, given.dim()), dtype=long)
        if name == "masked_select":
            return given.new_empty((count,))
        if name == "repeat_interleave":
            size = kwargs.get("output_size")
            return given.new_empty((count if size is None else size,))
        return self._unique(func, args, kwargs, given, count)

    def _unique(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict, given: torch.Tensor, count: int) -> Any:
        """All elements (or all slices along a dim) are different."""
        names = [argument.name for argument in func._schema.arguments]
        defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
        bound = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        dim = bound.get("dim")
        size = count if dim is None else given.shape[dim]
        found = given.new_empty((count,)) if dim is None else given.new_empty(tuple(given.shape))
        shape = tuple(given.shape) if dim is None else (size,)
        inverse = given.new_empty(shape if bound["return_inverse"] else (0,), dtype=torch.long)
        counts = given.new_empty((size,) if bound["return_counts"] else (0,), dtype=torch.long)
        return found, inverse, counts

    def mask_to_indices(self, args: tuple, module: str) -> tuple:
        """The arguments of an indexing op with each bool mask replaced by as many indices as it selects."""
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            value = self.get(index)
            if value is None:
                count = index.numel()
                self._note(module, "index", f"a mask selects all {count} elements")
                count = self.answers.selected(count)
            else:
                with _disable_current_modes():
                    count = int(value.count_nonzero())
                count = self.answers.selected(count, self.origin((index,)))
            indices += [index.new_empty((count,), dtype=torch.long) for _ in range(index.dim())]
        return (args[0], indices, *args[2:])

    def note(self, op: str, what: str) -> None:
        """Remember an assumption that no module is known for."""
        self._note("", op, what)

    def _note(self, module: str, op: str, what: str) -> None:
        self.assumed.setdefault((module, op, what))


def is_masked(args: tuple) -> bool:
    """Some index of an indexing op is a mask."""
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def may_keep(tensor: torch.Tensor) -> bool:
    """A tensor of the inputs or the model whose value is kept."""
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= MAX_INT_NUMEL


def _is_small(leaf: Any) -> bool:
    """The memory that keeps it is small: a mask that is expanded over a model's width takes no more than before."""
    if not isinstance(leaf, torch.Tensor):
        return True
    held = leaf.untyped_storage().nbytes() // leaf.element_size()
    return min(held, leaf.numel()) <= (MAX_FLOAT_NUMEL if leaf.is_floating_point() else MAX_INT_NUMEL)


def _is_spread(leaf: Any) -> bool:
    """A small tensor expanded to a large one: only views of it are as small."""
    return isinstance(leaf, torch.Tensor) and leaf.numel() > max(MAX_FLOAT_NUMEL, MAX_INT_NUMEL)
