"""What a device and its links can do, as data.

A profile is one JSON file. Every figure in it names its source in ``sources``; the headroom is a list of named
parts, so that an allowance made from a profile can say what it keeps back.
"""

from typing import Literal

import msgspec


class Headroom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a device's memory that tensors may not occupy.

    Attributes:
        name: what occupies it, such as ``context``.
        num_bytes: how much.
        source: where the figure is from; ``estimate`` if it was not measured.
    """

    name: str
    num_bytes: int
    source: str


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The interconnect within a node.

    Attributes:
        bytes_per_second: bandwidth in one direction that a ring over the node's devices has (bus bandwidth).
    """

    bytes_per_second: int


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The interconnect between nodes.

    A communication library runs one ring over each network card of a node, so the bandwidth between nodes is that of
    all cards together: reading the rate of one card as that of the whole ring is wrong by their number.

    Attributes:
        card_bytes_per_second: bandwidth of one card in one direction.
        cards_per_node: cards that the devices of a node share.
    """

    card_bytes_per_second: int
    cards_per_node: int

    @property
    def bytes_per_second(self) -> int:
        """Bandwidth in one direction of all cards of a node."""
        return self.card_bytes_per_second * self.cards_per_node


class Protocol(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way in which the communication library may run a collective; it takes the fastest for the message's size.

    Attributes:
        name: such as ``LL128``.
        algorithm: ``ring``, or ``tree`` (all-reduce only).
        serves: the collectives that run in this way: ``all-gather``, ``reduce-scatter``, ``all-reduce``.
        start_ns: time of a collective without bytes and without hops.
        hop_ns: time of a hop between two devices of a node.
        network_hop_ns: time of a hop between two nodes.
        bandwidth: fraction of the link's bandwidth that carries data.
    """

    name: str
    algorithm: Literal["ring", "tree"]
    serves: tuple[Literal["all-gather", "reduce-scatter", "all-reduce"], ...]
    start_ns: int
    hop_ns: int
    network_hop_ns: int
    bandwidth: float


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How well a measured figure describes what it was fitted to.

    Attributes:
        name: what was fitted, such as ``all-gather over 2``.
        num_points: measurements.
        median_error: median of ``|fitted / measured - 1|``.
        largest_error: the largest of them.
    """

    name: str
    num_points: int
    median_error: float
    largest_error: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """On what a profile was measured.

    Attributes:
        machine: the device and the machine's kind, in words.
        torch: version.
        backend: of the process group.
        num_devices: devices that took part.
        num_threads: threads of each process (on cpu).
        fits: how well each fitted figure describes its measurements.
    """

    machine: str
    torch: str
    backend: str
    num_devices: int
    num_threads: int
    fits: tuple[Fit, ...]


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A device, its memory, its rates and its links.

    Attributes:
        name: such as ``h100-80gb``.
        kind: torch's device type: ``cuda`` or ``cpu``.
        memory_bytes: what the device has.
        headroom: what the default allowance keeps back, by name.
        flops_per_second: dense peak by dtype name (``bfloat16``, ``float32``, …).
        achievable: fraction of a peak that real kernels reach: ``compute`` (matrix products), ``attention`` (fused
            attention), ``memory`` and ``link``.
        memory_bytes_per_second: peak memory bandwidth.
        launch_ns: host time to launch one kernel.
        unit_host_ns: host time that FSDP2 needs for one unit in one direction.
        devices_per_node: devices that share the ``within_node`` link.
        within_node: the link between devices of one node.
        between_nodes: the network between nodes.
        protocols: the ways in which collectives run; at least one is a ring.
        overlap: ``streams`` if communication and the host run beside the device's compute, ``none`` if whatever is
            issued is waited for (gloo on cpu).
        sources: where each figure is from, by field name.
        calibration: on what the profile was measured; not there if it was not.
    """

    name: str
    kind: str
    memory_bytes: int
    headroom: tuple[Headroom, ...]
    flops_per_second: dict[str, int]
    achievable: dict[str, float]
    memory_bytes_per_second: int
    launch_ns: int
    unit_host_ns: int
    devices_per_node: int
    within_node: Link
    between_nodes: Network
    protocols: tuple[Protocol, ...]
    overlap: Literal["streams", "none"]
    sources: dict[str, str]
    calibration: Calibration | None = None

    @property
    def headroom_bytes(self) -> int:
        """Bytes that the default allowance keeps back."""
        return sum(part.num_bytes for part in self.headroom)
