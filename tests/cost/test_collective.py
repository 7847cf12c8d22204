"""Collectives by hand: 8 devices in a node, 400 GB/s within, 4 cards of 20 GB/s between nodes, half of it reached."""

import msgspec
import pytest

from autoshard.cost import (
    Group,
    all_gather_ns,
    all_reduce_ns,
    all_reduce_wires,
    fastest_ns,
    gather_wires,
    reduce_scatter_ns,
)
from autoshard.hardware import DeviceProfile, Link, Network, Protocol, load_profile


def _protocol(algorithm: str, start: int, hop: int, network_hop: int, bandwidth: float, *serves: str) -> Protocol:
    return Protocol(
        name="x",
        algorithm=algorithm,  # type: ignore[arg-type]
        serves=serves or ("all-gather", "reduce-scatter", "all-reduce"),  # type: ignore[arg-type]
        start_ns=start,
        hop_ns=hop,
        network_hop_ns=network_hop,
        bandwidth=bandwidth,
    )


QUICK = _protocol("ring", 5, 2, 11, 0.25)
WIDE = _protocol("ring", 40, 3, 13, 1.0)
TREE = _protocol("tree", 17, 1, 7, 0.5, "all-reduce")
PROFILE: DeviceProfile = msgspec.structs.replace(
    load_profile("h100-80gb"),
    within_node=Link(bytes_per_second=400_000_000_000),
    between_nodes=Network(card_bytes_per_second=20_000_000_000, cards_per_node=4),
    protocols=(WIDE,),
    achievable={"attention": 1.0, "compute": 1.0, "memory": 1.0, "link": 0.5},
)


def _with(*protocols: Protocol) -> DeviceProfile:
    return msgspec.structs.replace(PROFILE, protocols=protocols)


def test_within_a_node() -> None:
    group = Group.of(PROFILE, 8)
    # 200 bytes per ns; 7/8 of 16 000 bytes are 14 000; seven hops of 3 ns.
    assert (group.num_nodes, group.bytes_per_second) == (1, 200_000_000_000)
    assert all_gather_ns(16_000, group) == 40 + 7 * 3 + 70
    assert reduce_scatter_ns(16_000, group) == 40 + 7 * 3 + 70
    assert all_reduce_ns(16_000, group) == 40 + 14 * 3 + 140


def test_shards_across_nodes_are_bound_by_the_cards_between_them() -> None:
    group = Group.of(PROFILE, 32)
    # All four cards: 40 bytes per ns; 31/32 of 12 800 bytes are 12 400; 3 of 31 hops are between nodes.
    assert (group.num_nodes, group.bytes_per_second) == (4, 40_000_000_000)
    assert all_gather_ns(12_800, group) == 40 + 28 * 3 + 3 * 13 + 310


def test_more_cards_carry_more_rings() -> None:
    one = msgspec.structs.replace(
        PROFILE, between_nodes=msgspec.structs.replace(PROFILE.between_nodes, cards_per_node=1)
    )
    assert Group.of(PROFILE, 32).bytes_per_second == 4 * Group.of(one, 32).bytes_per_second


def test_the_network_is_never_faster_than_what_a_device_takes() -> None:
    fast = msgspec.structs.replace(
        PROFILE, between_nodes=msgspec.structs.replace(PROFILE.between_nodes, cards_per_node=100)
    )
    assert Group.of(fast, 32).bytes_per_second == 200_000_000_000


def test_replicas_share_the_nodes_cards() -> None:
    group = Group.of(PROFILE, 4, stride=8)
    # One device of each node takes part, the other seven are busy with their own group: an eighth of 40.
    assert (group.num_nodes, group.bytes_per_second) == (4, 5_000_000_000)
    assert all_reduce_ns(1_000, group) == 40 + 2 * 3 * 13 + 2 * 150


def test_replicas_within_a_node() -> None:
    group = Group.of(PROFILE, 4, stride=2)
    assert (group.num_nodes, group.bytes_per_second) == (1, 200_000_000_000)


def test_nodes_not_filled() -> None:
    assert Group.of(PROFILE, 12).num_nodes == 2
    assert all_gather_ns(0, Group.of(PROFILE, 9)) == 40 + 7 * 3 + 13


def test_a_small_message_takes_the_way_that_starts_quickly_and_a_large_one_the_wide_one() -> None:
    group = Group.of(_with(WIDE, QUICK), 8)
    quick, wide = 5 + 7 * 2, 40 + 7 * 3
    assert all_gather_ns(800, group) == quick + 700 // 50 < wide + 700 // 200
    assert all_gather_ns(80_000, group) == wide + 70_000 // 200 < quick + 70_000 // 50
    reached = [size / all_gather_ns(size, group) for size in (8, 80, 800, 8_000, 80_000, 800_000)]
    assert reached == sorted(reached)


def test_a_tree_serves_all_reduces_only_and_wins_where_hops_are_many() -> None:
    group = Group.of(_with(WIDE, TREE), 64)
    assert all_gather_ns(0, group) == 40 + 56 * 3 + 7 * 13
    # 8 nodes are three doublings; seven hops inside a node; up and down.
    assert all_reduce_ns(0, group) == 17 + 2 * (7 + 3 * 7) < 40 + 2 * (56 * 3 + 7 * 13)
    large = 10_000_000
    ring = 40 + 2 * (56 * 3 + 7 * 13) + -(-2 * large * 63 // (64 * 40))
    assert all_reduce_ns(large, group) == ring


def test_the_way_is_chosen_for_all_buffers_of_a_collective_together() -> None:
    group = Group.of(_with(WIDE, QUICK), 8)
    parts = [gather_wires(8_000, group) for _ in range(10)]
    assert fastest_ns(group.gathers, parts) == all_gather_ns(80_000, group) < 10 * all_gather_ns(8_000, group)
    halves = [all_reduce_wires(400, group)] * 2
    assert fastest_ns(group.all_reduces, halves) == all_reduce_ns(800, group)


@pytest.mark.parametrize("price", [all_gather_ns, reduce_scatter_ns, all_reduce_ns])
def test_a_group_of_one_has_nothing_to_do(price: object) -> None:
    assert price(12_345, Group.of(_with(WIDE, TREE), 1)) == 0  # type: ignore[operator]


def test_a_protocol_serves_what_it_says() -> None:
    gather, scatter = _protocol("ring", 5, 0, 0, 1.0, "all-gather"), _protocol("ring", 9, 0, 0, 0.5, "reduce-scatter")
    group = Group.of(_with(gather, scatter, TREE), 8)
    assert all_gather_ns(8_000, group) == 5 + 7_000 // 200
    assert reduce_scatter_ns(8_000, group) == 9 + 7_000 // 100
    assert all_reduce_ns(8_000, group) == 17 + 2 * 7 + 14_000 // 100


def test_bytes_are_rounded_up() -> None:
    assert all_gather_ns(1, Group.of(PROFILE, 2)) == 40 + 3 + 1


def test_what_nccl_would_take_on_64_h100() -> None:
    """By hand from its tables: 400 GB/s of cards, 0.8 of it reached; LL128 beats Simple below half a gigabyte."""
    group = Group.of(load_profile("h100-80gb"), 64)
    assert group.bytes_per_second == 320_000_000_000
    ll128, simple = 14_000 + 56 * 1_900 + 7 * 4_000, 8_400 + 56 * 3_400 + 7 * 14_000
    size = 436_000_000
    assert all_gather_ns(size, group) == ll128 + -(-size * 63 // (64 * 300))
    assert all_gather_ns(10 * size, group) == simple + -(-10 * size * 63 // (64 * 320))
