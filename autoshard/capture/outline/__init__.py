"""Outlining: blocks that are alike are traced once, and each further one is written down from that recording.

``pairing`` says whether two blocks are alike, ``arguments`` whether they get alike inputs, ``recording`` traces a block
alone, ``replay`` writes a recording into the step with autograd connected as the block itself would have, and
``outliner`` decides. What cannot be replayed exactly is traced in full, and the reason is kept.
``skips`` leaves blocks out of a forward that is only looked at.
"""

from autoshard.capture.outline.outliner import Alike, Outlines, make_outliner
from autoshard.capture.outline.skips import Count, Skips

__all__ = ["Alike", "Count", "Outlines", "Skips", "make_outliner"]
