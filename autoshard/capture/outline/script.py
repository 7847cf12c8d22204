"""A recording, indexed for writing it down: what appears and what is let go of with each op, and in which segments."""

from autoshard.capture.outline.arguments import Layout
from autoshard.capture.outline.recording import Recording
from autoshard.capture.refusals import NotReplayable
from autoshard.capture.storages import ALIVE


class Script:
    """A recording, indexed for writing it down.

    Attributes:
        recording: what is indexed.
        given: by role, the storages that are there before, each with its place.
        births: by phase and op, the storages that appear during it.
        deaths: by phase and op, the storages that the block lets go of after it; at the end, those before the first.
        crossing: layouts of the recording's own storages that leave the block, by number.
        segments: first and past-the-end backward op of each node of the chain.
        touched: for each segment, module runs and the range of its ops that belong to them.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.crossing: dict[int, Layout] = {}
        for result in recording.results:
            if result.source == "storage" and recording.pieces[result.number].role == "own":
                self._cross(result.number, result.layout)
        for event in recording.events:
            for _, number, layout in event.parts:
                if recording.pieces[number].role in ("argument", "buffer"):
                    raise NotReplayable("the gradient of an argument is a view of an argument")
                if recording.pieces[number].role == "own":
                    self._cross(number, layout)
        self.births: dict[str, dict[int, list[int]]] = {"forward": {}, "backward": {}}
        self.deaths: dict[str, dict[int, list[int]]] = {"forward": {}, "backward": {}}
        for number, piece in enumerate(recording.pieces):
            if piece.role == "own":
                self.births[piece.born_phase].setdefault(piece.born, []).append(number)
            if piece.died_phase != ALIVE:
                self.deaths[piece.died_phase].setdefault(piece.died, []).append(number)
        self.given: dict[str, list[tuple[int, int]]] = {"argument": [], "buffer": [], "gradient": []}
        for number, piece in enumerate(recording.pieces):
            if piece.role != "own":
                self.given[piece.role].append((number, piece.place))
        ends = [event.position for event in recording.events]
        self.segments = list(zip([0, *ends], [*ends, len(recording.backward)], strict=True))
        self.touched = [self._touches(*segment) for segment in self.segments]

    def _cross(self, number: int, layout: Layout) -> None:
        known = self.crossing.setdefault(number, layout)
        if known.dtype != layout.dtype:
            raise NotReplayable("memory leaves it in two dtypes")
        if known.is_view and not layout.is_view:
            self.crossing[number] = layout

    def _touches(self, first: int, end: int) -> list[tuple[int, int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for index in range(first, end):
            span = self.recording.backward_spans[index]
            if span >= 0:
                found[span] = (found.get(span, (index, 0))[0], index)
        return [(span, low, high) for span, (low, high) in found.items()]
