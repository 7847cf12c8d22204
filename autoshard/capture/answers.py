"""What a model is told when it asks its data, and other answers that it might have got.

A step is captured with one set of answers. On another rank, or in the next step, the same questions may be answered
otherwise: a coin falls, a threshold is not reached, a batch holds no picture. ``Answers`` gives the usual ones, and on
request others, so that a second run shows what depends on them.
"""

from dataclasses import dataclass
from enum import IntFlag
from typing import Literal

MANY = 1000
"""Times a module may ask in vain; then the answer changes, so that a loop that waits for it ends."""


class Origin(IntFlag):
    """Where an answer comes from, as far as another rank may get another one."""

    SAME = 0
    CHANCE = 1
    INPUTS = 2
    DATA = 4


Way = Literal["usual", "other", "alternating"]


@dataclass(slots=True)
class Answers:
    """One set of answers.

    Attributes:
        origin: whose answers are not the usual ones.
        way: how they differ: each the ``other`` one, or in turn.
        coin: what a single random number between 0 and 1 is.
        seed: of the other random numbers.
        asked: whose answers the model asked for.
        num_asked: answers given other than the usual way.
        draws_in_python: Python's or numpy's global random numbers were drawn.
    """

    origin: Origin = Origin.SAME
    way: Way = "usual"
    coin: float = 0.5
    seed: int = 0
    asked: Origin = Origin.SAME
    num_asked: int = 0
    draws_in_python: bool = False

    def boolean(self, usual: bool, origin: Origin) -> bool:
        """The answer to a question of yes or no."""
        turn = self._turn(origin)
        if turn is None:
            return usual
        return not usual if self.way == "other" else turn % 2 == 0

    def number(self, usual: float, origin: Origin) -> float:
        """The answer to a question for a number; it has the type of the usual one."""
        turn = self._turn(origin)
        if turn is None:
            return usual
        if self.way == "other":
            return type(usual)(0 if usual else 1)
        return type(usual)(turn % 3)

    def selected(self, usual: int, origin: Origin = Origin.DATA) -> int:
        """How many elements a condition selects."""
        turn = self._turn(origin)
        if turn is None:
            return usual
        return 0 if self.way == "other" or turn % 2 else usual

    def _turn(self, origin: Origin) -> int | None:
        """Number of the answer among those that are not the usual ones; ``None`` if it is to be the usual one."""
        self.asked |= origin
        if self.way == "usual" or not origin & self.origin:
            return None
        self.num_asked += 1
        return self.num_asked
