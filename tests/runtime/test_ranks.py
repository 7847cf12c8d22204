"""The harness itself: values, errors, deaths and hangs."""

import os
import time

import pytest

from tests.runtime.ranks import RankLost, RanksFailed, note, run_ranks, try_ranks

pytestmark = pytest.mark.slow


def _sum(rank: int, world: int, base: int) -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor(base + rank)
    dist.all_reduce(total)
    return int(total)


def _raise(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("no such thing")


def _die(rank: int, world: int) -> None:
    note("about to die")
    if rank == 0:
        os._exit(3)
    time.sleep(600)


def _hang(rank: int, world: int) -> None:
    note(f"waiting as rank {rank}")
    if rank == 1:
        time.sleep(600)


def test_values_of_all_ranks() -> None:
    assert run_ranks(_sum, 10, world=3) == [33, 33, 33]


def test_an_error_keeps_its_type() -> None:
    first, second = try_ranks(_raise)
    assert first.error is None
    assert isinstance(second.error, KeyError)
    assert "no such thing" in second.trace
    with pytest.raises(RanksFailed, match="no such thing"):
        run_ranks(_raise)


def test_a_death_is_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runtime.ranks.GRACE_SECONDS", 0.5)
    first, second = try_ranks(_die, seconds=30)
    assert isinstance(first.error, RankLost)
    assert str(first.error) == "died"
    assert str(second.error) == "hung after: about to die"


def test_a_hang_ends_and_names_the_note() -> None:
    start = time.monotonic()
    first, second = try_ranks(_hang, seconds=4)
    assert time.monotonic() - start < 15
    assert first.error is None
    assert isinstance(second.error, RankLost)
    assert str(second.error) == "hung after: waiting as rank 1"
