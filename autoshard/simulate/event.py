"""What can happen in a step: the events that the replay of FSDP2's hooks makes and the fold prices."""

from typing import Literal

import msgspec

from autoshard.simulate.units import Reduction

Phase = Literal["forward", "backward", "optimizer"]
Kind = Literal[
    "hook",
    "gather",
    "copy out",
    "compute",
    "reshard",
    "flush",
    "release",
    "reduce",
    "average",
    "settle",
    "finish",
    "next inputs",
    "merge",
    "keep",
    "clip",
    "optimizer",
    "zero grad",
]


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One thing that happens in the step.

    Attributes:
        kind: ``hook`` (host work of a unit's hooks), ``gather`` (an all-gather is issued), ``copy out`` (it is waited
            for and copied into the unsharded parameters), ``compute`` (ops run), ``reshard`` (unsharded parameters are
            freed), ``flush`` (the last all-gather buffer of forward is freed), ``release`` (the oldest reduce-scatter
            input is waited for and freed), ``reduce`` (gradients are copied and a reduce-scatter is issued),
            ``average`` (gradients of replicated parameters are averaged), ``settle`` (what a unit still holds at the
            end of backward is freed), ``finish`` (compute waits for all reductions), ``next inputs`` (the
            outputs of the micro-batch before are let go, the inputs of the next are cast), ``merge`` (whole gradients
            are added to those kept from earlier micro-batches, and freed), ``keep`` (whole gradients are cast to the
            dtype of the reduction and kept for later micro-batches), ``clip``, ``optimizer``, ``zero grad``.
        phase: of the step.
        unit: index of the unit, -1 for none.
        start: first position (``compute``: first op).
        stop: past-the-end op of ``compute``; otherwise the same as ``start``.
        reduction: what is reduced (``reduce``, and ``reshard`` just before it).
        gradients: gradients that appear during ``compute``: (op, key of the parameter).
        merged: gradients that autograd adds to ones that are there during ``compute``, and frees: (first op without
            it, key of the parameter).
        key: dtype of the replicated parameters of ``average``.
        keys: the parameters of ``merge`` and ``keep``.
        is_deferred: the all-gather's buffer outlives the copy-out (forward), until the next copy-out is done.
        drops_gather: ``settle`` frees an all-gather that nobody waited for, not an all-reduce's buffer.
        is_accumulated: ``reduce`` adds to gradient shards that are there already.
        is_unsharded: ``reshard`` finds unsharded parameters (else it only makes gradients of zeros).
        micro_batch: index of the micro-batch.
    """

    kind: Kind
    phase: Phase
    unit: int = -1
    start: int
    stop: int
    reduction: Reduction | None = None
    gradients: tuple[tuple[int, str], ...] = ()
    merged: tuple[tuple[int, str], ...] = ()
    key: str = ""
    keys: tuple[str, ...] = ()
    is_deferred: bool = False
    drops_gather: bool = False
    is_accumulated: bool = False
    is_unsharded: bool = True
    micro_batch: int = 0
