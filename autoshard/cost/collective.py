"""Time of a collective: a start that depends on the topology, plus the bytes on the wire (alpha-beta).

All-gather and reduce-scatter are rings: every rank sends ``(n - 1) / n`` of the buffer, and the slowest link sets the
pace; an all-reduce is a reduce-scatter and an all-gather, or runs over a tree. This is the definition of bus bandwidth
in nccl-tests (PERFORMANCE.md), and the profile's link rates are bus bandwidths. Between nodes there is one ring over
each network card, so the rates of a node's cards add up.

A communication library has several protocols: some start quickly and carry less data in each line, others the other way
round. It takes the one that is fastest for the message, so the bandwidth that is reached grows with the message's size.
A protocol's start is that of its kernel plus a time for each hop: a ring of ``n`` ranks on ``m`` nodes has ``n - 1``
steps, ``m - 1`` of them between nodes, and twice as many for an all-reduce; a tree has ``2 (n / m - 1)`` hops in a node
and ``2 log2 m`` between nodes. This is the model by which NCCL itself chooses (``src/graph/tuning.cc``).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.cost.op import NS_PER_SECOND
from autoshard.hardware import DeviceProfile, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a collective over a group.

    Attributes:
        start_ns: time without bytes.
        bytes_per_second: bus bandwidth that its data reaches.
    """

    start_ns: int
    bytes_per_second: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of one axis of the mesh, as the links see them.

    Attributes:
        num_ranks: ranks that take part.
        num_nodes: nodes over which they are spread.
        bytes_per_second: bus bandwidth that they reach, whatever the protocol.
        gathers: the ways to run an all-gather.
        scatters: the ways to run a reduce-scatter.
        all_reduces: the ways to run an all-reduce.
    """

    num_ranks: int
    num_nodes: int
    bytes_per_second: int
    gathers: tuple[Way, ...]
    scatters: tuple[Way, ...]
    all_reduces: tuple[Way, ...]

    @classmethod
    def of(cls, profile: DeviceProfile, num_ranks: int, stride: int = 1) -> "Group":
        """The group of ``num_ranks`` ranks that stand ``stride`` apart; node by node, ranks are consecutive.

        A node's cards are shared by all groups that run at once, so a group with only some of a node's devices has only
        their part. (Shard axis: stride 1. Replicate axis: stride is the size of the shard axis.)
        """
        per_node = max(1, min(num_ranks, profile.devices_per_node // stride))
        num_nodes = -(-num_ranks // per_node)
        rate = profile.within_node.bytes_per_second
        if num_nodes > 1:
            rate = min(rate, profile.between_nodes.bytes_per_second * per_node // profile.devices_per_node)
        rate = int(rate * profile.achievable["link"])

        def ways(collective: str, passes: int) -> tuple[Way, ...]:
            return tuple(
                Way(
                    start_ns=_start_ns(protocol, num_ranks, num_nodes, passes),
                    bytes_per_second=max(1, int(rate * protocol.bandwidth)),
                )
                for protocol in profile.protocols
                if collective in protocol.serves
            )

        return cls(
            num_ranks=num_ranks,
            num_nodes=num_nodes,
            bytes_per_second=rate,
            gathers=ways("all-gather", 1),
            scatters=ways("reduce-scatter", 1),
            all_reduces=ways("all-reduce", 2),
        )


def _start_ns(protocol: Protocol, num_ranks: int, num_nodes: int, passes: int) -> int:
    if num_ranks == 1:
        return 0
    hops, network_hops = num_ranks - num_nodes, num_nodes - 1
    if protocol.algorithm == "tree":
        hops, network_hops = -(-num_ranks // num_nodes) - 1, (num_nodes - 1).bit_length()
    return protocol.start_ns + passes * (hops * protocol.hop_ns + network_hops * protocol.network_hop_ns)


Wires = tuple[int, ...]
"""Time of some bytes on the wire for each way of a group."""


def gather_wires(num_bytes: int, group: Group) -> Wires:
    """Time of ``(n - 1) / n`` of a buffer on the wire, for each of the group's ways to all-gather."""
    return _wires(num_bytes, group.num_ranks, group.gathers)


def scatter_wires(num_bytes: int, group: Group) -> Wires:
    """Time of ``(n - 1) / n`` of a buffer on the wire, for each of the group's ways to reduce-scatter."""
    return _wires(num_bytes, group.num_ranks, group.scatters)


def all_reduce_wires(num_bytes: int, group: Group) -> Wires:
    """Time of two times ``(n - 1) / n`` of a buffer on the wire, for each of the group's ways to all-reduce."""
    return _wires(2 * num_bytes, group.num_ranks, group.all_reduces)


def _wires(num_bytes: int, num_ranks: int, ways: tuple[Way, ...]) -> Wires:
    sent = num_bytes * (num_ranks - 1) * NS_PER_SECOND
    return tuple(-(-sent // (num_ranks * way.bytes_per_second)) for way in ways)


def fastest_ns(ways: tuple[Way, ...], wires: Iterable[Wires]) -> int:
    """Time of one collective that moves several buffers at once: the fastest of the ways.

    Args:
        ways: of the group.
        wires: for each buffer its time on the wire by way; they are rounded one by one, so that a sum does not depend
            on how buffers are grouped.
    """
    sums = [way.start_ns for way in ways]
    for wire in wires:
        sums = [total + each for total, each in zip(sums, wire, strict=True)]
    return min(sums)


def all_gather_ns(num_bytes: int, group: Group) -> int:
    """Time of an all-gather whose output has ``num_bytes``; 0 for a group of one, which has nothing to do."""
    return fastest_ns(group.gathers, [gather_wires(num_bytes, group)])


def reduce_scatter_ns(num_bytes: int, group: Group) -> int:
    """Time of a reduce-scatter whose input has ``num_bytes``; 0 for a group of one."""
    return fastest_ns(group.scatters, [scatter_wires(num_bytes, group)])


def all_reduce_ns(num_bytes: int, group: Group) -> int:
    """Time of an all-reduce of a buffer of ``num_bytes``; 0 for a group of one."""
    return fastest_ns(group.all_reduces, [all_reduce_wires(num_bytes, group)])
