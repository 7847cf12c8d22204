"""One model to which any number of questions are put: its step is captured once for each size of the inputs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoshard.capture import find_accelerator
from autoshard.capture.inputs import read_pairs
from autoshard.ir import ModelGraph
from autoshard.pipeline import Answer, capture_step, named_methods, plan_graph, sized_inputs
from autoshard.request import Question, Request, resolve

if TYPE_CHECKING:
    from torch import nn

MakeInputs = Callable[[int | None, int | None], Any]
"""From batch size and sequence length (``None`` for what the inputs have by themselves) to the inputs of a step."""


class Subject:
    """A model, and what was captured of it so far.

    Args:
        model: on a real device or on meta; it is left as it was.
        make_inputs: inputs of one training step for a batch size and a sequence length.
        loss: from the outputs to a scalar; without it a scalar is found in the outputs.
        entry: the method that runs the step.
        progress: told what begins.
    """

    def __init__(
        self,
        model: "nn.Module",
        make_inputs: MakeInputs,
        loss: Callable[[Any], Any] | None = None,
        entry: str = "forward",
        progress: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.model, self.make_inputs, self.loss, self.entry, self.progress = model, make_inputs, loss, entry, progress
        self._graphs: dict[tuple[int | None, int | None, str, str], ModelGraph] = {}

    def question(self, request: Request) -> Question:
        """The request with nothing open, the accelerators of this machine taken into account."""
        return resolve(request, find_accelerator())

    def graph(self, question: Question, batch: int | None = None, seq: int | None = None) -> ModelGraph:
        """The captured step; from the second time on it is there already."""
        key = batch, seq, question.compute_dtype, question.profile.kind
        if key not in self._graphs:
            sizes = [f"{name} {size}" for name, size in (("batch", batch), ("sequence length", seq)) if size]
            self.progress("capturing one training step" + (f" of {', '.join(sizes)}" if sizes else ""))
            inputs = sized_inputs(lambda *given: read_pairs(self.make_inputs(*given)), batch, seq)
            self._graphs[key] = capture_step(self.model, inputs, self.loss, self.entry, question)
        return self._graphs[key]

    def ask(self, request: Request, batch: int | None = None, seq: int | None = None) -> Answer:
        """The answer to a request.

        Raises:
            RequestError: the request is not a question, or the inputs have no such sizes.
            CaptureError: the step does not run on these inputs.
            NoLegalUnitError: FSDP2 cannot shard the model.
            InfeasibleBudgetError: no plan fits.
        """
        question = self.question(request)
        return plan_graph(self.graph(question, batch, seq), question, named_methods(self.model, request.methods))
