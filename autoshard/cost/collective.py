"""Time of a collective: a start that depends on the topology alone, plus the bytes on the wire (alpha-beta).

All-gather and reduce-scatter are rings: every rank sends ``(n - 1) / n`` of the buffer, and the slowest link sets the
pace; an all-reduce is a reduce-scatter and an all-gather. This is the definition of bus bandwidth in nccl-tests
(PERFORMANCE.md), and the profile's link rates are bus bandwidths.

The start is the latency of the level within the node, plus that of the level between nodes for each doubling of the
number of nodes. Rings proper have ``n - 1`` steps, but communication libraries pipeline them and switch to trees when
latency dominates; the logarithm stands for that. It is an assumption, and no device has confirmed it.
"""

from dataclasses import dataclass

from autoshard.cost.op import NS_PER_SECOND
from autoshard.hardware import DeviceProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of one axis of the mesh, as the links see them.

    Attributes:
        num_ranks: ranks that take part.
        num_nodes: nodes over which they are spread.
        bytes_per_second: bus bandwidth that they reach.
        start_ns: time of a collective without bytes.
    """

    num_ranks: int
    num_nodes: int
    bytes_per_second: int
    start_ns: int

    @classmethod
    def of(cls, profile: DeviceProfile, num_ranks: int, stride: int = 1) -> "Group":
        """The group of ``num_ranks`` ranks that stand ``stride`` apart; node by node, ranks are consecutive.

        A node's links to other nodes are shared by all groups that run at once, so a group with only some of a node's
        devices has only their part. (Shard axis: stride 1. Replicate axis: stride is the size of the shard axis.)
        """
        per_node = max(1, min(num_ranks, profile.devices_per_node // stride))
        num_nodes = -(-num_ranks // per_node)
        rate, start = profile.within_node.bytes_per_second, profile.within_node.latency_ns
        if num_nodes > 1:
            rate = min(rate, profile.between_nodes.bytes_per_second * per_node // profile.devices_per_node)
            start += profile.between_nodes.latency_ns * (num_nodes - 1).bit_length()
        return cls(
            num_ranks=num_ranks,
            num_nodes=num_nodes,
            bytes_per_second=int(rate * profile.achievable["link"]),
            start_ns=start,
        )


def start_ns(group: Group) -> int:
    """Time of a collective's start; 0 for a group of one, which has nothing to do."""
    return group.start_ns if group.num_ranks > 1 else 0


def wire_ns(num_bytes: int, group: Group) -> int:
    """Time of ``(n - 1) / n`` of a buffer on the wire."""
    sent = num_bytes * (group.num_ranks - 1) * NS_PER_SECOND
    return -(-sent // (group.num_ranks * group.bytes_per_second))


def all_gather_ns(num_bytes: int, group: Group) -> int:
    """Time of an all-gather whose output has ``num_bytes``."""
    return start_ns(group) + wire_ns(num_bytes, group)


def reduce_scatter_ns(num_bytes: int, group: Group) -> int:
    """Time of a reduce-scatter whose input has ``num_bytes``."""
    return start_ns(group) + wire_ns(num_bytes, group)


def all_reduce_ns(num_bytes: int, group: Group) -> int:
    """Time of an all-reduce of a buffer of ``num_bytes``."""
    return start_ns(group) + 2 * wire_ns(num_bytes, group)
