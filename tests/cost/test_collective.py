"""Collectives by hand: 8 devices in a node, 400 GB/s within and 80 GB/s between nodes, 5 ns and 11 ns to start."""

import msgspec
import pytest

from autoshard.cost import Group, all_gather_ns, all_reduce_ns, reduce_scatter_ns
from autoshard.hardware import DeviceProfile, Link, load_profile

PROFILE: DeviceProfile = msgspec.structs.replace(
    load_profile("h100-80gb"),
    within_node=Link(bytes_per_second=400_000_000_000, latency_ns=5),
    between_nodes=Link(bytes_per_second=80_000_000_000, latency_ns=11),
    achievable={"compute": 1.0, "memory": 1.0, "link": 0.5},
)


def test_within_a_node() -> None:
    group = Group.of(PROFILE, 8)
    # 200 bytes per ns; 7/8 of 16 000 bytes are 14 000.
    assert (group.num_nodes, group.bytes_per_second, group.start_ns) == (1, 200_000_000_000, 5)
    assert all_gather_ns(16_000, group) == 5 + 70
    assert reduce_scatter_ns(16_000, group) == 5 + 70
    assert all_reduce_ns(16_000, group) == 5 + 140


def test_shards_across_nodes_are_bound_by_the_link_between_them() -> None:
    group = Group.of(PROFILE, 32)
    # 40 bytes per ns; 4 nodes are two doublings; 31/32 of 12 800 bytes are 12 400.
    assert (group.num_nodes, group.bytes_per_second, group.start_ns) == (4, 40_000_000_000, 5 + 2 * 11)
    assert all_gather_ns(12_800, group) == 27 + 310


def test_replicas_share_the_nodes_links() -> None:
    group = Group.of(PROFILE, 4, stride=8)
    # One device of each node takes part, the other seven are busy with their own group: an eighth of 40.
    assert (group.num_nodes, group.bytes_per_second, group.start_ns) == (4, 5_000_000_000, 5 + 2 * 11)
    assert all_reduce_ns(1_000, group) == 27 + 2 * 150


def test_replicas_within_a_node() -> None:
    group = Group.of(PROFILE, 4, stride=2)
    assert (group.num_nodes, group.bytes_per_second) == (1, 200_000_000_000)


def test_nodes_not_filled() -> None:
    assert Group.of(PROFILE, 12).num_nodes == 2
    assert Group.of(PROFILE, 9).start_ns == 5 + 11


@pytest.mark.parametrize("price", [all_gather_ns, reduce_scatter_ns, all_reduce_ns])
def test_a_group_of_one_has_nothing_to_do(price: object) -> None:
    assert price(12_345, Group.of(PROFILE, 1)) == 0  # type: ignore[operator]


def test_bytes_are_rounded_up() -> None:
    assert all_gather_ns(1, Group.of(PROFILE, 2)) == 5 + 1
