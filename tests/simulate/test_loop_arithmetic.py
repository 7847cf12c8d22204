"""Micro-batches, gradients left as zeros, first steps and forms of the optimizer, with sums written out by hand.

Three units of 97, 211 and 151 elements on 4 devices; each op's output has 64 bytes and is kept.
"""

import msgspec
import pytest

from autoshard.plan import Decisions
from autoshard.request import Request, resolve
from autoshard.simulate import KINDS, State, Timeline, simulate
from tests.graphs import Par, build, chain, mod
from tests.simulate.measured import decisions

SHARDS = 100 + 212 + 152
"""Padded to multiples of 4 elements, a fourth of it, 4 bytes each."""
PADDED = (400, 848, 608)
WHOLE = (388, 844, 604)
INPUTS = 4 * 8
UNITS = (("0",), ("1",), ("2",))


def _run(plan: Decisions, *, is_first: bool = False, **asked: object) -> Timeline:
    options = {"precision": "fp32", "optimizer": "sgd", **asked}
    question = resolve(Request(device="h100-80gb", devices=plan.num_devices, **options))  # type: ignore[arg-type]
    return simulate(build(chain(97, 211, 151)), plan, question, is_first=is_first)


def _after(timeline: Timeline, kind: str, micro_batch: int) -> list[State]:
    return [e.state for e in timeline.entries if (e.event.kind, e.event.micro_batch) == (kind, micro_batch)]


def _bytes(state: State, kind: str) -> int:
    return dict(zip(KINDS, state.live, strict=True))[kind]


def test_reduced_in_each_micro_batch_the_shards_of_gradients_stay_and_are_added_to() -> None:
    plan = decisions(*UNITS, shards=4, micro_batches=3)
    timeline = _run(plan)
    for batch, found in enumerate(([152, 364, 464], [464] * 3, [464] * 3)):
        assert [_bytes(state, "sharded_grads") for state in _after(timeline, "reduce", batch)] == found
    once = _run(decisions(*UNITS, shards=4))
    assert len(list(timeline.collectives())) == 3 * len(list(once.collectives()))
    assert timeline.phase_peak_bytes("forward") == once.phase_peak_bytes("forward") + SHARDS
    # While the last unit is reduced there are its new shards beside the old ones of all.
    reduce_2 = _after(timeline, "reduce", 1)[0]
    assert reduce_2.high - _after(once, "reduce", 0)[0].high == SHARDS


def test_reduced_in_the_last_micro_batch_whole_gradients_stay() -> None:
    plan = decisions(*UNITS, shards=4, micro_batches=3, gradient_sync="last")
    timeline = _run(plan)
    kinds = [c.kind for c in timeline.collectives()]
    assert kinds.count("all_gather") == 3 * 6
    assert kinds.count("reduce_scatter") == 3
    for batch in (1, 2):
        begin = _after(timeline, "next inputs", batch)[0]
        assert _bytes(begin, "unsharded_grads") == sum(WHOLE)
        assert _bytes(begin, "sharded_grads") == 0
    # The second gradient of unit 1 is added to the first as soon as it is whole.
    computes = [e for e in timeline.entries if e.event.merged and e.event.micro_batch == 1]
    assert [key for e in computes for _, key in e.event.merged] == ["2.weight", "1.weight", "0.weight"]
    assert [_bytes(e.state, "unsharded_grads") for e in computes] == [sum(WHOLE)] * 3
    assert _bytes(_after(timeline, "reduce", 2)[-1], "unsharded_grads") == 0


def test_whole_gradients_are_kept_in_the_dtype_of_the_reduction() -> None:
    plan = decisions(*UNITS, shards=4, micro_batches=2, gradient_sync="last", param="bfloat16", reduce="float32")
    timeline = _run(plan)
    kept = _after(timeline, "keep", 0)
    assert [_bytes(state, "unsharded_grads") for state in kept] == [604, 604 + 844, 604 + 844 + 388]
    # The cast makes 604 bytes while 302 are there, and then frees these.
    assert [state.high - sum(state.live) for state in kept] == [302, 422, 194]
    merged = _after(timeline, "merge", 1)
    assert [_bytes(state, "unsharded_grads") for state in merged] == [sum(WHOLE), sum(WHOLE) - 604, 388]
    reduced = _after(timeline, "reduce", 1)
    assert [_bytes(state, "unsharded_grads") for state in reduced] == [844 + 388, 388, 0]


def test_replicas_hold_the_buffer_of_an_all_reduce_whose_result_is_added() -> None:
    plan = decisions(*UNITS, shards=4, replicas=2, micro_batches=2)
    timeline = _run(plan)
    first, second = (_after(timeline, "finish", batch)[0] for batch in (0, 1))
    assert _bytes(first, "reduce_scatter_buffers") == PADDED[0]  # the last input; the outputs are the shards themselves
    assert _bytes(second, "reduce_scatter_buffers") == PADDED[0] + SHARDS


@pytest.mark.parametrize("is_first", [True, False])
def test_zeros_are_there_from_the_second_step_on(is_first: bool) -> None:
    timeline = _run(decisions(*UNITS, shards=4), zero_grad="zeros", is_first=is_first)
    assert sum(timeline.start.live) == SHARDS + INPUTS + (0 if is_first else SHARDS)
    assert timeline.phase_end_bytes("optimizer") == 2 * SHARDS + INPUTS


def test_zeros_of_replicated_parameters_are_whole() -> None:
    graph = build(mod("", mod("0", weight=Par(shape=(97,))), mod("1", weight=Par(shape=(211,)))))
    plan = decisions(("0",), shards=4, replicated=("1.weight",))
    question = resolve(Request(device="h100-80gb", devices=4, precision="fp32", optimizer="sgd", zero_grad="zeros"))
    assert sum(simulate(graph, plan, question).start.live) == 100 + 844 + 100 + 844 + INPUTS


def test_the_first_step_makes_the_state() -> None:
    timeline = _run(decisions(*UNITS, shards=4), optimizer="adamw-foreach", is_first=True)
    step = next(e.state for e in timeline.entries if e.event.kind == "optimizer")
    assert timeline.steady_bytes == SHARDS
    assert sum(step.live) == SHARDS + INPUTS + SHARDS + 2 * SHARDS
    assert step.high == sum(step.live) + SHARDS


@pytest.mark.parametrize(
    ("optimizer", "state", "temporary"),
    [
        ("adamw", 2 * SHARDS, SHARDS),
        ("adamw-foreach", 2 * SHARDS, SHARDS),
        ("adamw-for-loop", 2 * SHARDS, max(200, 2 * 212 + 100, 2 * 152 + 212)),
        ("adamw-fused", 2 * SHARDS + 3 * 4, 0),
        ("adamw-8bit", 2 * SHARDS, 2 * 212),
        ("sgd-momentum", SHARDS, 0),
        ("sgd", 0, 0),
    ],
)
def test_forms_of_the_optimizer(optimizer: str, state: int, temporary: int) -> None:
    timeline = _run(decisions(*UNITS, shards=4), optimizer=optimizer)
    assert timeline.steady_bytes == SHARDS + state
    step = next(e.state for e in timeline.entries if e.event.kind == "optimizer")
    assert step.high - sum(step.live) == temporary


def test_8bit_moments_of_large_even_shards() -> None:
    """8192 elements a shard: codes, 32 scales and a table; 8191 rows make a shard that no block divides."""
    graph = build(chain(4 * 8192, 4 * 8191))
    question = resolve(Request(device="h100-80gb", devices=4, precision="fp32", optimizer="adamw-8bit"))
    timeline = simulate(graph, decisions(("0",), ("1",), shards=4), question)
    assert timeline.steady_bytes == 4 * (8192 + 8191) + 2 * (8192 + 4 * 32 + 4 * 256) + 2 * 4 * 8191


def test_clipping_makes_two_numbers_for_each_gradient() -> None:
    timeline = _run(decisions(*UNITS, shards=4), clip=True)
    clip = next(e.state for e in timeline.entries if e.event.kind == "clip")
    assert clip.high - sum(clip.live) == 3 * 2 * 4
    assert [e.kind for e in timeline.events[-3:]] == ["clip", "optimizer", "zero grad"]


def test_micro_batches_alike_after_the_first_cost_alike() -> None:
    """Peaks of the second are those of the third: what is kept does not grow."""
    for sync in ("every", "last"):
        plan = decisions(*UNITS, shards=4, micro_batches=4, gradient_sync=sync)
        by_batch = {
            batch: max(
                e.state.high for e in _run(plan).entries if e.event.micro_batch == batch and e.event.phase == "backward"
            )
            for batch in (1, 2)
        }
        assert by_batch[1] == by_batch[2]
        fewer = msgspec.structs.replace(plan, micro_batches=3)
        assert _run(plan).peak_bytes == _run(fewer).peak_bytes
