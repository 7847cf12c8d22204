"""What a device and its links can do, as data.

A profile is one JSON file. Every figure in it names its source in ``sources``; the headroom is a list of named
parts, so that an allowance made from a profile can say what it keeps back.
"""

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
    """The interconnect of one level.

    Attributes:
        bytes_per_second: bandwidth in one direction that a ring over these devices reaches in total (bus bandwidth).
        latency_ns: time of one collective's start, whatever its size.
    """

    bytes_per_second: int
    latency_ns: int


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device, its memory, its rates and its links.

    Attributes:
        name: such as ``h100-80gb``.
        kind: torch's device type: ``cuda`` or ``cpu``.
        memory_bytes: what the device has.
        headroom: what the default allowance keeps back, by name.
        flops_per_second: dense peak by dtype name (``bfloat16``, ``float32``, …).
        achievable: fraction of a peak that real kernels reach: ``compute``, ``memory`` and ``link``.
        memory_bytes_per_second: peak memory bandwidth.
        launch_ns: host time to launch one kernel.
        unit_host_ns: host time that FSDP2 needs for one unit in one direction.
        devices_per_node: devices that share the ``within_node`` link.
        within_node: the link between devices of one node.
        between_nodes: the link between nodes.
        sources: where each figure is from, by field name.
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
    between_nodes: Link
    sources: dict[str, str]

    @property
    def headroom_bytes(self) -> int:
        """Bytes that the default allowance keeps back."""
        return sum(part.num_bytes for part in self.headroom)
