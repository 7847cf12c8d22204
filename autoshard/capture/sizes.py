"""Inputs of any batch size and sequence length; far ones are answered from small captures where that is exact.

A step with millions of tokens has inputs and masks of gigabytes, and where a model asks for values of its inputs they
are no longer followed (``values``). The numbers of a step are polynomials of the size that varies (``ir.scaling``), so
three small captures give them, and a fourth has to confirm every one of them: at the largest size that would still be
captured itself, so that no window or chunk below it goes unseen. Where it does not (a loop over tokens) the step is
captured at the size that was asked.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoshard.capture.inputs import Pair
from autoshard.errors import CaptureError, Diagnostic, ModelLoadError, RequestError
from autoshard.ir import ModelGraph
from autoshard.ir.scaling import extrapolated, first_difference

FAR_TOKENS = 1 << 17
"""From this many tokens (or samples, where no sequence length is asked) on a step is not captured at its own size."""

STEPS = {"seq": 256, "batch": 8}
"""Distance between the captured sizes. All sizes leave the same rest, so that padding to a multiple stays linear."""

BASES = (1, 17, 33)
"""Smallest captured size in distances: later tries start above windows and chunks of 4096 and of 8192."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedInputs:
    """Example inputs that can be made in any size; called, it makes them in the size that was asked.

    Attributes:
        make: pairs of a batch size and a sequence length, ``None`` for the default.
        batch: the batch size that was asked.
        seq: the sequence length that was asked.
    """

    make: Callable[[int | None, int | None], tuple[Pair, ...]]
    batch: int | None
    seq: int | None

    def __call__(self) -> list[Pair]:
        """The pairs in the size that was asked."""
        return list(self.make(self.batch, self.seq))

    @property
    def axis(self) -> str:
        """What varies: ``seq`` if it is long enough to have smaller ones, else ``batch``, else nothing."""
        for name, size in (("seq", self.seq), ("batch", self.batch)):
            if size is not None and size // STEPS[name] > BASES[0] + 3:
                return name
        return ""

    @property
    def largest_near(self) -> int:
        """The largest size of what varies that is not far."""
        other = self.batch if self.axis == "seq" else self.seq
        return (FAR_TOKENS - 1) // (other or 1)

    def at(self, size: int) -> list[Pair]:
        """The pairs at another size of what varies."""
        batch, seq = (size, self.seq) if self.axis == "batch" else (self.batch, size)
        return list(self.make(batch, seq))


def is_far(batch: int | None, seq: int | None) -> bool:
    """So much is asked that the step is not captured at its own size."""
    return (batch or 1) * (seq or 1) >= FAR_TOKENS


def capture_far(inputs: SizedInputs, capture: Callable[[list[Pair]], ModelGraph]) -> ModelGraph:
    """The graph at the asked size, from small captures if they agree on it; a note in it says which.

    Args:
        inputs: what is asked.
        capture: of pairs of inputs.

    Raises:
        CaptureError: the step does not run at the asked size, where that was tried.
    """
    axis, reason = inputs.axis, "neither batch nor seq is large enough to have smaller ones"
    asked = (inputs.seq if axis == "seq" else inputs.batch) or 0
    for base in BASES if axis else ():
        first = base * STEPS[axis] + asked % STEPS[axis]
        steps = (asked - first) // STEPS[axis]
        if steps <= 3:
            break
        found = _from_samples(inputs, capture, first, steps)
        if isinstance(found, ModelGraph):
            return found
        reason = found
    graph = capture(inputs())
    note = _note("AS121", f"captured at the asked size and not extrapolated from small ones: {reason}")
    return replace(graph, diagnostics=(*graph.diagnostics, note))


def _from_samples(
    inputs: SizedInputs, capture: Callable[[list[Pair]], ModelGraph], first: int, steps: int
) -> ModelGraph | str:
    """The extrapolated graph, or why there is none."""
    axis = inputs.axis
    sizes = [first + number * STEPS[axis] for number in range(3)]
    graphs: list[ModelGraph] = []
    size = first
    checked = min((inputs.largest_near - first) // STEPS[axis], steps - 1)
    if checked <= 2:
        return f"no size above {axis} {sizes[-1]} is small enough to be captured"
    try:
        for size in sizes:
            graphs.append(capture(inputs.at(size)))
            difference = first_difference(graphs[0], graphs[-1])
            if difference:
                return f"between {axis} {first} and {size} {difference}"
        samples = (graphs[0], graphs[1], graphs[2])
        size = first + checked * STEPS[axis]
        difference = first_difference(extrapolated(samples, checked), capture(inputs.at(size)), numbers=True)
        if difference:
            return f"at {axis} {size} {difference} (extrapolated and captured)"
    except (CaptureError, ModelLoadError, RequestError) as error:
        reason = error.reason if isinstance(error, CaptureError | ModelLoadError) else str(error)
        return f"at {axis} {size} the step does not run ({reason.splitlines()[0]})"
    graph = extrapolated(samples, steps)
    note = _note(
        "AS120",
        f"the step at {axis} {first + steps * STEPS[axis]} is extrapolated from captures at {axis} "
        f"{', '.join(map(str, sizes))}; a capture at {size} agreed in every number",
    )
    return replace(graph, diagnostics=(*graph.diagnostics, note))


def _note(code: str, message: str) -> Diagnostic:
    return Diagnostic(code=code, severity="note", where="inputs", message=message)
