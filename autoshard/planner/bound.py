"""A lower bound of the step time that holds for every plan of a model on a mesh.

Three streams each have work that no plan avoids, and the step cannot be shorter than the longest of them:

- compute: the ops of the captured step;
- the host: it launches these ops and runs the hooks of at least one unit;
- the shard axis's communicator: every parameter that is used is gathered once at least, every gradient reduced once,
  with at least one start of each.

Where nothing overlaps, their sum. After the last of them comes the optimizer's step, which is the same for all plans
(padding is per parameter).
"""

from autoshard.cost import Group, all_gather_ns, reduce_scatter_ns
from autoshard.request import Question
from autoshard.simulate import StepProfile, Timeline


def lower_bound_ns(timeline: Timeline, profile: StepProfile, question: Question) -> int:
    """Time that no plan of the same model on the same mesh undercuts under the cost model.

    Args:
        timeline: the step under any legal plan; only sums that are equal for all plans are taken from it.
        profile: the step on one device.
        question: for the device and the mesh.
    """
    group = Group.of(question.profile, question.num_shards)
    gathered: dict[str, int] = {}
    reduced = 0
    for collective in timeline.collectives():
        if collective.kind == "all_gather":
            gathered[collective.unit] = collective.num_bytes
        elif collective.kind == "reduce_scatter":
            reduced += collective.num_bytes
    # One collective of all bytes takes no longer than several: each way is a start plus a rate.
    wire = all_gather_ns(sum(gathered.values()), group) if gathered else 0
    wire += reduce_scatter_ns(reduced, group) if reduced else 0
    host = profile.launched[-1] * profile.launch_ns + question.profile.unit_host_ns
    streams = (profile.compute_ns, host, wire)
    longest = sum(streams) if question.profile.overlap == "none" else max(streams)
    return longest + timeline.setup.optimizer.step_ns
