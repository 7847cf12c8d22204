"""The only part that decides: the search, and the well-known policies as baselines. Imports no torch."""

from autoshard.planner.baselines import Baseline, baselines
from autoshard.planner.candidate import Candidate
from autoshard.planner.compiled import compiled_blocks
from autoshard.planner.found import Found
from autoshard.planner.search import search
from autoshard.planner.small_root import with_small_root

__all__ = ["Baseline", "Candidate", "Found", "baselines", "compiled_blocks", "search", "with_small_root"]
