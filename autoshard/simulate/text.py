"""A timeline as stable text, for ``--dump timeline`` and for tests."""

from autoshard.simulate.state import KINDS
from autoshard.simulate.timeline import Timeline
from autoshard.sizes import format_bytes, format_ns


def format_timeline(timeline: Timeline) -> str:
    """One line for each event: what happened, the most alive during it, what is alive after it, the clocks."""
    header = (
        f"# steady {timeline.steady_bytes} B, peak {timeline.peak_bytes} B ({format_bytes(timeline.peak_bytes)}) at "
        f"{timeline.peak_at}; step {format_ns(timeline.step_ns)}, exposed {format_ns(timeline.exposed_ns)}\n"
        "# phase     event      unit                             highest B        alive B     compute ns        host ns"
        "       shard ns  alive by kind\n"
    )
    lines = []
    for entry in timeline.entries:
        event, state = entry.event, entry.state
        subject = timeline.unit_name(event) or event.key
        if event.kind == "compute":
            subject = f"ops {event.start}..{event.stop}"
        kinds = ", ".join(f"{kind} {size}" for kind, size in zip(KINDS, state.live, strict=True) if size)
        lines.append(
            f"{event.phase:<10}  {event.kind:<9}  {subject:<28}  {state.high:>12}  {sum(state.live):>13}  "
            f"{state.compute_ns:>13}  {state.host_ns:>13}  {state.shard_ns:>13}  {kinds}"
        )
    return header + "\n".join(lines) + "\n"
