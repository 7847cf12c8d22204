"""The ops of a step and the pieces of memory that they allocate, in the order of events.

A storage is followed from the op that made it to the last op before it was freed; Python's own reference counting
tells when, through a weak reference to the storage. Parameters are not listed; inputs and buffers belong to the caller.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from autoshard.ir import CALLER, Moment, OpNode, StorageInfo
from autoshard.ir.graph import Phase, StorageKind

ALIVE = ""


class Gradient(NamedTuple):
    """The gradient of a parameter at the end of the step.

    Attributes:
        number: of its storage, -1 if no op showed it.
        nbytes: its own bytes.
    """

    number: int
    nbytes: int


class StorageRecord:
    """One storage while the step is traced; where it died is an index that may be -1 (before the first op)."""

    __slots__ = ("born", "born_phase", "died", "died_phase", "kind", "nbytes", "span")

    def __init__(self, nbytes: int, phase: str, born: int, kind: str, span: Any) -> None:
        self.nbytes, self.born_phase, self.born, self.kind, self.span = nbytes, phase, born, kind, span
        self.died_phase, self.died = ALIVE, 0


class StorageLog:
    """What has happened so far.

    Attributes:
        phase: ``forward`` or ``backward``.
        forward: ops of the forward.
        backward: ops of the backward.
        records: storages in the order of their appearance.
        param_keys: parameter by its storage.
        twins: parameter by the id of the model's own tensor, which no op of the step should meet, with its twin.
        alias_places: where a second reference to a parameter is kept, by the storage of the tensor that stands for it.
        backward_spans: the module run of each backward op.
        replayed_grads: gradients that no op of this process made, since their block was replayed, by parameter key.
        replayed_sparse: keys of those of them that are sparse.
        replayed_params: keys of the parameters that replayed blocks read.
        replayed_modules: FQNs of the blocks that were replayed.
    """

    def __init__(self) -> None:
        self.phase: Phase = "forward"
        self.forward: list[OpNode] = []
        self.backward: list[OpNode] = []
        self.ops = self.forward
        self.records: list[StorageRecord] = []
        self.param_keys: dict[int, str] = {}
        self.twins: dict[int, tuple[str, torch.Tensor]] = {}
        self.alias_places: dict[int, str] = {}
        self._live: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref] = {}
        self.is_closed = False
        self._kept: list[torch.Tensor] = []
        self.backward_spans: list[Any] = []
        self.replayed_grads: dict[str, Gradient] = {}
        self.replayed_sparse: set[str] = set()
        self.replayed_params: set[str] = set()
        self.replayed_modules: set[str] = set()

    def keep(self, tensor: torch.Tensor) -> None:
        """A tensor that the caller holds on to after the step, such as the loss."""
        self._kept.append(tensor)

    def has_left_over(self) -> bool:
        """Somebody holds a tensor of the step although the caller lets go of what it kept."""
        self._kept.clear()
        self.twins.clear()
        return any(watcher() is not None for watcher in self._watchers.values())

    def begin_backward(self) -> None:
        """From here on ops are backward ops."""
        self.phase, self.ops = "backward", self.backward

    def add_param(self, key: str, param: torch.Tensor) -> None:
        """Parameters are known by their storage and not listed."""
        self.param_keys[param.untyped_storage()._cdata] = key

    def add_real(self, key: str, param: torch.Tensor, twin: torch.Tensor) -> None:
        """The model's own tensor of a parameter that a fake one stands in for."""
        self.twins[id(param)] = (key, twin)

    def add_alias(self, key: str, place: str, tensor: torch.Tensor) -> None:
        """The tensor that stands for a second reference to a parameter."""
        self.param_keys[tensor.untyped_storage()._cdata] = key
        self.alias_places[tensor.untyped_storage()._cdata] = place

    def add_given(self, tensor: torch.Tensor, kind: StorageKind) -> int:
        """Number of a storage that was there before the step, under which it is listed from now on."""
        return self._index(tensor.untyped_storage(), kind, None)

    def index(self, storage: torch.UntypedStorage, span: Any) -> int:
        """Number of a storage; an unknown one was made by the op that is running."""
        found = self._live.get(storage._cdata)
        return self._index(storage, "activation", span) if found is None else found

    def known_index(self, storage: torch.UntypedStorage) -> int:
        """Number of a storage that an op reads; an unknown one was there before the step."""
        found = self._live.get(storage._cdata)
        return self._index(storage, "input", None) if found is None else found

    def is_known(self, storage: torch.UntypedStorage) -> bool:
        """The storage has a number or is a parameter's."""
        return storage._cdata in self._live or storage._cdata in self.param_keys

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the distinct storages of tensors, parameters left out."""
        storages = {storage._cdata: storage for storage in map(_storage, tensors) if storage is not None}
        return sum(storage.nbytes() for cdata, storage in storages.items() if cdata not in self.param_keys)

    def known(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Numbers of the storages of tensors, as far as they have one."""
        numbers = set()
        for storage in map(_storage, tensors):
            if storage is not None and storage._cdata in self._live:
                numbers.add(self._live[storage._cdata])
        return numbers

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Number of the storage of a tensor, ``None`` for a parameter and for what no op has shown."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def gradient(self, grad: torch.Tensor) -> Gradient:
        """A gradient that an op of this process made."""
        dense = grad if grad.layout is torch.strided else grad._values()
        return Gradient(self._live.get(dense.untyped_storage()._cdata, -1), dense.numel() * dense.element_size())

    def finish(self, grads: dict[str, Gradient]) -> tuple[StorageInfo, ...]:
        """The storages as the IR lists them; what is alive now outlives the step.

        Gradients of parameters that were joined in the forward may be views of one storage. It is then listed once
        for each of them, with the bytes of its gradient. The values of a sparse gradient have a storage that no op
        showed; it is listed at the end of the backward.

        Args:
            grads: gradients by parameter key, in the order of the parameters.
        """
        self.is_closed = True
        keys: dict[int, list[str]] = {}
        sizes: dict[str, int] = {}
        for key, grad in grads.items():
            keys.setdefault(grad.number, []).append(key)
            sizes[key] = grad.nbytes
        last = StorageRecord(0, "backward", len(self.backward) - 1, "activation", None)
        infos = []
        others = [(last, key, sizes[key]) for key in keys.get(-1, ())]
        for number, record in enumerate(self.records):
            first, *rest = keys.get(number, [""])
            others += [(record, key, sizes[key]) for key in rest]
            infos.append(self._info(record, first, record.nbytes - sum(sizes[key] for key in rest)))
        return (*infos, *(self._info(record, key, nbytes) for record, key, nbytes in others))

    def _index(self, storage: torch.UntypedStorage, kind: StorageKind, span: Any) -> int:
        cdata = storage._cdata
        number = len(self.records)
        self.records.append(StorageRecord(storage.nbytes(), self.phase, len(self.ops), kind, span))
        self._live[cdata] = number
        self._watchers[number] = weakref.ref(storage, lambda _: self._died(cdata, number))
        return number

    def _died(self, cdata: int, number: int) -> None:
        if self._live.get(cdata) == number:
            del self._live[cdata]
        self._watchers.pop(number, None)
        if not self.is_closed:
            record = self.records[number]
            record.died_phase, record.died = self.phase, len(self.ops) - 1

    def _info(self, record: StorageRecord, param: str, nbytes: int) -> StorageInfo:
        is_given = record.kind in ("input", "buffer")
        died_phase, died = record.died_phase, record.died
        if died < 0 and died_phase == "backward":  # freed before the first backward op
            died_phase, died = "forward", len(self.forward) - 1
        outlives = record.died_phase == ALIVE
        kind: StorageKind
        if is_given:
            kind = record.kind  # type: ignore[assignment]
        elif param:
            kind = "gradient"
        elif outlives:
            kind = "output"
        else:
            kind = "temporary" if record.born_phase == died_phase else "activation"
        return StorageInfo(
            nbytes=nbytes,
            born=CALLER if is_given else Moment(phase=record.born_phase, index=record.born),  # type: ignore[arg-type]
            dies=CALLER if outlives or is_given else Moment(phase=died_phase, index=max(0, died)),  # type: ignore[arg-type]
            kind=kind,
            param=param,
        )


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None
