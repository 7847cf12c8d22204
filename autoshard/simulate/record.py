"""The whole timeline as data for programs, as ``autoshard plan --timeline FILE`` writes it."""

from typing import Any

from autoshard.simulate.state import KINDS
from autoshard.simulate.timeline import Timeline

VERSION = 1
"""Version of the form."""


def timeline_record(timeline: Timeline) -> dict[str, Any]:
    """Every event of the step and the device after it, in built-in types: the same timeline gives the same record.

    ``events`` stand in order. ``high_bytes`` is the most that is alive during an event and ``high_at`` where that is;
    ``live_bytes`` is what is alive after it, in the order of ``kinds``. Times are nanoseconds from the start of the
    step under the cost model: when compute, the host and the shard axis's communicator are free.
    """
    return {
        "version": VERSION,
        "peak_bytes": timeline.peak_bytes,
        "peak_at": timeline.peak_at,
        "steady_bytes": timeline.steady_bytes,
        "step_ns": timeline.step_ns,
        "exposed_ns": timeline.exposed_ns,
        "kinds": list(KINDS),
        "start_bytes": list(timeline.start.live),
        "events": [
            {
                "phase": entry.event.phase,
                "kind": entry.event.kind,
                "unit": timeline.unit_name(entry.event),
                "ops": [entry.event.start, entry.event.stop],
                "high_bytes": entry.state.high,
                "high_at": timeline.describe(entry.event, entry.state.high_op),
                "live_bytes": list(entry.state.live),
                "compute_ns": entry.state.compute_ns,
                "host_ns": entry.state.host_ns,
                "shard_ns": entry.state.shard_ns,
                "exposed_ns": entry.state.exposed_ns,
            }
            for entry in timeline.entries
        ],
        "collectives": [
            {
                "kind": each.kind,
                "unit": each.unit,
                "phase": each.phase,
                "num_bytes": each.num_bytes,
                "dtype": each.dtype,
            }
            for each in timeline.collectives()
        ],
    }
