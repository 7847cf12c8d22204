"""Clocks of chains against a second, shorter statement of the same rules, over fast and slow links.

The oracle walks units, not events, and knows nothing of bytes alive: for each unit a copy of its shards, an all-gather,
a copy-out, its ops, and in backward the copy into a reduce-scatter. The links range from far faster than the ops to far
slower.
"""

import math
import random

import msgspec
import pytest

from autoshard.hardware import Link
from autoshard.request import Question
from autoshard.simulate import simulate
from tests.graphs import TOKENS, build, chain
from tests.simulate.measured import decisions
from tests.simulate.test_arithmetic import UNIT_RATES, question_on

START = 7
ACT = 64
LOSS = ACT + 4


def _oracle(sizes: list[int], kept: list[bool], slowness: int) -> int:
    """Step of a chain of fp32 units on 2 devices at ``slowness`` nanoseconds per byte on the link, with SGD."""

    def wire(size: int) -> int:
        return START + size * slowness // 2

    def gathered(size: int) -> int:
        nonlocal may_gather, wire_free
        may_gather += size  # its half is read and written
        wire_free = max(wire_free, may_gather) + wire(size)
        return wire_free

    unsharded = [4 * size for size in sizes]
    compute = wire_free = may_gather = copied = 0
    for size, elements in zip(unsharded, sizes, strict=True):
        gathered(size)
        may_gather = max(may_gather, copied)
        copied = compute = max(compute, wire_free) + 2 * size
        compute += max(2 * TOKENS * elements, ACT + size + ACT)
    may_gather = max(may_gather, copied)
    compute += 2 * LOSS
    arrival = reduced = 0
    last = len(sizes) - 1
    for index in range(last, -1, -1):
        size = unsharded[index]
        if index == last and not kept[index]:
            arrival = gathered(size)
        if not kept[index]:
            may_gather = compute = max(compute, arrival) + 2 * size
        if index and not kept[index - 1]:
            arrival = gathered(unsharded[index - 1])
        compute += max(4 * TOKENS * sizes[index], ACT + size + ACT)
        compute = max(compute, reduced) + 2 * size
        reduced = wire_free = max(wire_free, compute) + wire(size)
    return max(compute, reduced) + sum(3 * size // 2 for size in unsharded)


@pytest.mark.parametrize("slowness", [1, 2, 8, 32])
@pytest.mark.parametrize("seed", range(12))
def test_clocks(seed: int, slowness: int) -> None:
    rng = random.Random(seed)
    sizes = [2 * rng.randint(1, 60) for _ in range(rng.randint(1, 6))]
    kept = [rng.random() < 0.3 for _ in sizes]
    link = Link(bytes_per_second=10**9 // slowness)
    profile = msgspec.structs.replace(UNIT_RATES, within_node=link)
    units = [((str(index),), not keep) for index, keep in enumerate(kept)]
    question: Question = question_on(profile, 2)
    timeline = simulate(build(chain(*sizes)), decisions(*units, shards=2), question)
    assert timeline.step_ns == _oracle(sizes, kept, slowness)


@pytest.mark.parametrize("seed", range(6))
def test_where_nothing_overlaps_the_step_is_the_sum_of_all_that_is_done(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [2 * rng.randint(1, 60) for _ in range(rng.randint(1, 6))]
    kept = [rng.random() < 0.3 for _ in sizes]
    launch, host, slowness = rng.randint(1, 50), rng.randint(1, 50), rng.randint(1, 9)
    link = Link(bytes_per_second=10**9 // slowness)
    profile = msgspec.structs.replace(UNIT_RATES, within_node=link, overlap="none", launch_ns=launch, unit_host_ns=host)
    units = [((str(index),), not keep) for index, keep in enumerate(kept)]
    timeline = simulate(build(chain(*sizes)), decisions(*units, shards=2), question_on(profile, 2))
    communication = other = 0
    for elements, keep in zip(sizes, kept, strict=True):
        size = 4 * elements
        num_gathers = 1 if keep else 2
        on_wire = -(-size // (2 * link.bytes_per_second / 10**9))
        communication += (num_gathers + 1) * (START + math.ceil(on_wire))
        # Copied in, copied out and run through by each gather; gradients copied in; two hooks; two ops; the optimizer.
        other += num_gathers * (size + 2 * size) + 2 * size + 2 * host + 2 * launch + 3 * size // 2
        other += max(2 * TOKENS * elements, ACT + size + ACT) + max(4 * TOKENS * elements, ACT + size + ACT)
    other += 2 * (LOSS + launch)
    assert timeline.exposed_ns == communication
    assert timeline.step_ns == communication + other
