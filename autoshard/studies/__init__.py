"""Answers around the answer: many questions about one captured model. Imports no torch itself.

``fit`` finds the fewest devices, the largest batch or sequence and the least memory; ``sweep`` asks for each of a grid;
``compare`` scores plans that are there already beside ours. All of them go through the pipeline, question by question.
"""

from autoshard.studies.compare import Score, compare_plans
from autoshard.studies.fit import Fitted, fewest_devices, largest_size, least_memory
from autoshard.studies.subject import Subject
from autoshard.studies.sweep import Cell, sweep

__all__ = [
    "Cell",
    "Fitted",
    "Score",
    "Subject",
    "compare_plans",
    "fewest_devices",
    "largest_size",
    "least_memory",
    "sweep",
]
