"""One training step of FSDP2 as a fold over events: memory and streams. Imports no torch.

``simulate`` replays a plan; the files in the order of the work: ``profile`` (the step on one device), ``recompute``
(that step where modules recompute), ``units`` (bytes and times of each unit), ``hooks`` (what FSDP2 does and when),
``fold`` (what that costs), ``timeline`` (the record), ``memory`` (where the bytes go, in short).
"""

from autoshard.simulate.compiled import uncertainty
from autoshard.simulate.event import Event
from autoshard.simulate.fold import advance
from autoshard.simulate.hooks import step_events
from autoshard.simulate.memory import peak_parts, phase_peaks, stretches
from autoshard.simulate.optimizer import OptimizerSizes, optimizer_sizes
from autoshard.simulate.profile import StepProfile, profile_step
from autoshard.simulate.record import timeline_record
from autoshard.simulate.state import KINDS, Setup, State, start
from autoshard.simulate.step import expected_collectives, simulate
from autoshard.simulate.text import format_timeline
from autoshard.simulate.timeline import Collective, Entry, Timeline
from autoshard.simulate.uncompared import not_modelled
from autoshard.simulate.units import Links, Reduction, Sizer, UnitSizes, in_fsdp_order, unit_sizes

__all__ = [
    "KINDS",
    "Collective",
    "Entry",
    "Event",
    "Links",
    "OptimizerSizes",
    "Reduction",
    "Setup",
    "Sizer",
    "State",
    "StepProfile",
    "Timeline",
    "UnitSizes",
    "advance",
    "expected_collectives",
    "format_timeline",
    "in_fsdp_order",
    "not_modelled",
    "optimizer_sizes",
    "peak_parts",
    "phase_peaks",
    "profile_step",
    "simulate",
    "start",
    "step_events",
    "stretches",
    "timeline_record",
    "uncertainty",
    "unit_sizes",
]
