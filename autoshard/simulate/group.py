"""What FSDP2 remembers of a unit (``FSDPParamGroup`` and ``FSDPState``)."""

from dataclasses import dataclass, field

from autoshard.simulate.profile import GradientMoment
from autoshard.simulate.units import Reduction, UnitSizes


@dataclass(slots=True, kw_only=True)
class Group:
    """A unit during a step; what it reduced and kept is remembered over micro-batches.

    Attributes:
        index: of the unit in the plan.
        sizes: its bytes and times.
        to_run: modules that still have to run forward before the unit is done.
        training: ``_training_state``.
        is_unsharded: its parameters are whole.
        is_pending: an all-gather is in flight.
        was_gathered: its parameters have been whole before.
        places: its places in ``post_forward_order``.
        waiting: gradients that have not been taken up yet.
        reduced: parameters whose gradient shards are there.
        kept: parameters whose whole gradients are kept from earlier micro-batches.
        holds_reduced: the reduction whose all-reduce buffer it holds.
    """

    index: int
    sizes: UnitSizes
    to_run: set[str] = field(default_factory=set)
    training: str = "idle"
    is_unsharded: bool = False
    is_pending: bool = False
    was_gathered: bool = False
    places: list[int] = field(default_factory=list)
    waiting: list[GradientMoment] = field(default_factory=list)
    reduced: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    holds_reduced: Reduction | None = None

    @property
    def has_params(self) -> bool:
        """It has something to gather."""
        return bool(self.sizes.keys)
