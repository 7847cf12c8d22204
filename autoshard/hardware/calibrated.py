"""A profile from timings: the figures that were measured take the place of those of a base profile.

What was not measured (the headroom, the network of a single node) is taken over from the base profile, and its source
says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from autoshard.hardware.fit import Line, Sample, fit_line, fit_rate
from autoshard.hardware.load import COLLECTIVES
from autoshard.hardware.profile import Calibration, DeviceProfile, Link, Network, Protocol

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """On what the timings were taken.

    Attributes:
        name: of the profile to make.
        description: the device and the machine's kind, in words.
        memory_bytes: memory of one device.
        torch: version.
        backend: of the process group.
        num_devices: devices that took part.
        devices_per_node: of one node.
        num_threads: threads of each process.
    """

    name: str
    description: str
    memory_bytes: int
    torch: str
    backend: str
    num_devices: int
    devices_per_node: int
    num_threads: int


def calibrated_profile(samples: Sequence[Sample], base: DeviceProfile, machine: Machine) -> DeviceProfile:
    """The profile that describes the timings best.

    Args:
        samples: the timings of ``matmul DTYPE``, ``attention DTYPE``, ``memory``, ``kernel``, of each collective, and
            of steps of models of several units: ``units plain``, ``units kept`` and ``units resharded``.
        base: for what was not measured.
        machine: on what they were taken.

    Raises:
        ValueError: the timings do not make a profile.
    """
    lines: dict[str, Line] = {}
    kernel = lines["kernel"] = fit_rate("kernel", _of(samples, "kernel"))
    launch_ns = round(kernel.ns_per_work)
    lines["memory"] = fit_rate("memory", _of(samples, "memory"), launch_ns)
    rates, attention = {}, 0
    for dtype in DTYPES:
        if timed := _of(samples, f"matmul {dtype}"):
            lines[f"matmul {dtype}"] = fit_rate(f"matmul {dtype}", timed, launch_ns)
            rates[dtype] = lines[f"matmul {dtype}"].per_second
        if timed := _of(samples, f"attention {dtype}"):
            lines[f"attention {dtype}"] = fit_rate(f"attention {dtype}", timed, launch_ns)
            attention = attention or round(lines[f"attention {dtype}"].per_second / rates[dtype] * 10**6)
    # One fraction serves all dtypes; a peak is what the faster of products and attention reaches.
    peak = max(1.0, attention / 10**6)
    links = _links(samples, base, machine, lines)
    unit_host_ns, gather_ns = _per_unit(samples, links.protocols, machine, lines)
    protocols = links.protocols
    if base.overlap == "none":
        # The host runs the collective, so what FSDP2 does around it belongs to its start.
        protocols = tuple(
            msgspec.structs.replace(way, start_ns=max(0, gather_ns - way.hop_ns * (machine.num_devices - 1)))
            if "all-gather" in way.serves
            else way
            for way in protocols
        )
    told = f"measured on {machine.num_devices} x {machine.description}"
    kept = f"taken over from the profile {base.name}: {{}}"
    sources = {name: told for name in base.sources if not name.startswith("flops_per_second.")}
    sources |= {f"flops_per_second.{dtype}": told for dtype in rates}
    sources["memory_bytes"] = f"reported by {machine.description}"
    sources["overlap"] = kept.format(base.sources["overlap"])
    sources["devices_per_node"] = "processes on one machine when it was measured"
    if not links.has_network:
        for name in ("between_nodes.card_bytes_per_second", "between_nodes.cards_per_node"):
            sources[name] = kept.format(base.sources[name])
    scale = machine.memory_bytes / base.memory_bytes
    headroom = tuple(
        msgspec.structs.replace(part, num_bytes=int(part.num_bytes * min(1.0, scale)), source=kept.format(part.source))
        for part in base.headroom
    )
    return msgspec.structs.replace(
        base,
        name=machine.name,
        memory_bytes=machine.memory_bytes,
        headroom=headroom,
        flops_per_second={dtype: int(rate * peak) for dtype, rate in rates.items()},
        achievable={
            "compute": round(1 / peak, 6),
            "attention": round((attention or 10**6) / 10**6 / peak, 6),
            "memory": 1.0,
            "link": 1.0,
        },
        memory_bytes_per_second=lines["memory"].per_second,
        launch_ns=launch_ns,
        unit_host_ns=unit_host_ns,
        devices_per_node=machine.devices_per_node,
        within_node=Link(bytes_per_second=links.bytes_per_second),
        between_nodes=links.network,
        protocols=protocols,
        sources=sources,
        calibration=Calibration(
            machine=machine.description,
            torch=machine.torch,
            backend=machine.backend,
            num_devices=machine.num_devices,
            num_threads=machine.num_threads,
            fits=tuple(line.fit for _, line in sorted(lines.items())),
        ),
    )


def _of(samples: Sequence[Sample], figure: str) -> list[Sample]:
    return [sample for sample in samples if sample.figure == figure]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    bytes_per_second: int
    network: Network
    has_network: bool
    protocols: tuple[Protocol, ...]


def _links(samples: Sequence[Sample], base: DeviceProfile, machine: Machine, lines: dict[str, Line]) -> _Links:
    """One protocol for each collective; rates within a node, and between nodes where groups span several."""
    by_group: dict[str, dict[tuple[int, int], Line]] = {}
    for collective in COLLECTIVES:
        timed = _of(samples, collective)
        groups = sorted({(sample.num_nodes, sample.num_ranks) for sample in timed})
        for nodes, ranks in groups:
            name = f"{collective} over {ranks}" + (f" on {nodes} nodes" if nodes > 1 else "")
            found = [s for s in timed if (s.num_nodes, s.num_ranks) == (nodes, ranks)]
            by_group.setdefault(collective, {})[nodes, ranks] = lines[name] = fit_line(name, found)
    inside = {c: {g: line for g, line in of.items() if g[0] == 1} for c, of in by_group.items()}
    across = {c: {g: line for g, line in of.items() if g[0] > 1} for c, of in by_group.items()}
    # The largest group of a node is the one that trains; smaller ones tell how the start grows.
    within = {c: (of or across[c])[max(of or across[c])] for c, of in inside.items()}
    fastest = max(line.per_second for line in within.values())
    network, has_network = base.between_nodes, any(across.values())
    protocols = []
    for collective, line in within.items():
        passes = 2 if collective == "all-reduce" else 1
        start, hop = _start_and_hop(inside[collective] or across[collective], passes)
        network_hop = hop
        if of := across[collective]:
            nodes, ranks = max(of)
            rest = of[nodes, ranks].start_ns - start - passes * (ranks - nodes) * hop
            network_hop = max(0, round(rest / (passes * (nodes - 1))))
        protocols.append(
            Protocol(
                name=f"{machine.backend} {collective}",
                algorithm="ring",
                serves=(collective,),  # type: ignore[arg-type]
                start_ns=start,
                hop_ns=hop,
                network_hop_ns=network_hop,
                bandwidth=round(line.per_second / fastest, 6),
            )
        )
    if has_network:
        rate = max(of[max(of)].per_second for of in across.values() if of)
        network = Network(card_bytes_per_second=rate // network.cards_per_node, cards_per_node=network.cards_per_node)
    return _Links(bytes_per_second=fastest, network=network, has_network=has_network, protocols=tuple(protocols))


def _start_and_hop(lines: dict[tuple[int, int], Line], passes: int) -> tuple[int, int]:
    """Start and time of a hop from groups of different sizes; of one size alone, all of it is taken to be hops."""
    points = [(passes * (ranks - 1), line.start_ns) for (_, ranks), line in lines.items()]
    if len(points) == 1:
        hops, start = points[0]
        return 0, round(start / hops)
    mean_x, mean_y = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    hop = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
    return max(0, round(mean_y - hop * mean_x)), round(hop)


def _per_unit(
    samples: Sequence[Sample], protocols: tuple[Protocol, ...], machine: Machine, lines: dict[str, Line]
) -> tuple[int, int]:
    """Host time of a unit in one direction, and the time of one all-gather of next to nothing as FSDP2 runs it.

    A step of a unit that is kept has one all-gather and one reduce-scatter, one that is resharded an all-gather more.
    """
    for figure in ("units plain", "units kept", "units resharded"):
        lines[figure] = fit_line(figure, _of(samples, figure), may_be_flat=True)
    plain, kept, resharded = (lines[f"units {how}"].ns_per_work for how in ("plain", "kept", "resharded"))
    start = {
        collective: way.start_ns + way.hop_ns * (machine.num_devices - 1)
        for way in protocols
        for collective in way.serves
    }
    gather_ns = max(round(resharded - kept), start["all-gather"])
    host_ns = (kept - plain - gather_ns - start["reduce-scatter"]) / 2
    return max(0, round(host_ns)), gather_ns


def encode_profile(profile: DeviceProfile) -> bytes:
    """The profile as a file: indented JSON that ``load_profile`` reads."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
