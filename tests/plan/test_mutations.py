"""2,000 damaged plan files: each is loaded or refused with a path, and nothing else ever happens."""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from autoshard.errors import PlanFormatError
from autoshard.plan import decode_plan, encode_plan
from tests.plans import full_plan, small_plan

NUM_SEEDS = 2000
Mutation = Callable[[random.Random, bytes], bytes]

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "a", ".", "a..b", "\x00", "\n", "\ud800", "模块", "‮", "é" * 50, "__class__", "../../etc", [], {}, [[]],
    [None], {"": 0}, {"$": {}}, [1, "a"], {"__reduce__": 1},
)  # fmt: skip


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def set_bytes(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + rng.randbytes(rng.randint(1, 6)) + data[start + rng.randint(0, 6) :]


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def splice(rng: random.Random, data: bytes) -> bytes:
    one, two, three = (rng.randrange(len(data)) for _ in range(3))
    return data[:one] + data[min(two, three) : max(two, three)] + data[one:]


def nest(rng: random.Random, data: bytes) -> bytes:
    depth = rng.choice((10, 900, 5000, 200_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    deep = opening * depth + b"1" + closing * (depth if rng.random() < 0.7 else depth - 1)
    place = data.index(b": ", rng.randrange(len(data) // 2)) + 2
    return data[:place] + deep + b"," + data[place:] if rng.random() < 0.3 else data[:place] + deep + data[place + 1 :]


def repeat_key(rng: random.Random, data: bytes) -> bytes:
    keys = [b'"version": ', b'"modules": ', b'"size": ', b'"peak_bytes": ', b'"code": ', b'"gap": ']
    places = [i for key in keys for i in range(len(data)) if data.startswith(key, i)]
    place = rng.choice(places)
    key = data[place : data.index(b": ", place) + 2]
    return data[:place] + key + rng.choice((b"1", b'"a"', b"[]")) + b", " + data[place:]


def _nodes(tree: Any) -> list[tuple[Any, Any]]:
    found, pending = [], [tree]
    while pending:
        node = pending.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            found.append((node, key))
            if isinstance(node[key], dict | list):
                pending.append(node[key])
    return found


def _in_tree(change: Callable[[random.Random, list[tuple[Any, Any]]], None]) -> Mutation:
    def mutate(rng: random.Random, data: bytes) -> bytes:
        tree = json.loads(data)
        for _ in range(rng.randint(1, 2)):
            change(rng, _nodes(tree))
        ascii_only = rng.random() < 0.5
        return json.dumps(tree, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")

    mutate.__name__ = change.__name__
    return mutate


def delete_field(rng: random.Random, nodes: list[tuple[Any, Any]]) -> None:
    node, key = rng.choice(nodes)
    del node[key]


def change_value(rng: random.Random, nodes: list[tuple[Any, Any]]) -> None:
    node, key = rng.choice(nodes)
    node[key] = rng.choice(ODD_VALUES)


def swap_values(rng: random.Random, nodes: list[tuple[Any, Any]]) -> None:
    (one, i), (other, j) = rng.choice(nodes), rng.choice(nodes)
    copies = json.loads(json.dumps([one[i], other[j]]))
    other[j], one[i] = copies


def add_field(rng: random.Random, nodes: list[tuple[Any, Any]]) -> None:
    node, _ = rng.choice(nodes)
    if isinstance(node, dict):
        node[rng.choice(("extra", "", "$", "version", "modules", "é"))] = rng.choice(ODD_VALUES)
    else:
        node.append(rng.choice(ODD_VALUES))


def repeat_item(rng: random.Random, nodes: list[tuple[Any, Any]]) -> None:
    lists = [(node, key) for node, key in nodes if isinstance(node, list)]
    node, key = rng.choice(lists)
    node.insert(rng.randint(0, len(node)), json.loads(json.dumps(node[key])))


MUTATIONS: tuple[Mutation, ...] = (
    flip_bits,
    set_bytes,
    truncate,
    splice,
    nest,
    repeat_key,
    *map(_in_tree, (delete_field, change_value, swap_values, add_field, repeat_item)),
)


def test_every_damaged_file_is_loaded_or_refused_with_a_path() -> None:
    sources = [encode_plan(full_plan()), encode_plan(small_plan())]
    refused: list[tuple[str, int, PlanFormatError]] = []
    loaded = 0
    started = time.process_time()
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        mutation = MUTATIONS[seed % len(MUTATIONS)]
        data = mutation(rng, rng.choice(sources))
        try:
            plan = decode_plan(data, "damaged.json")
        except PlanFormatError as error:
            refused.append((mutation.__name__, seed, error))
        else:
            # What is let in is a plan in full: it can be written, and reads back as itself.
            assert decode_plan(encode_plan(plan)) == plan
            loaded += 1
    assert time.process_time() - started < 20
    for _, seed, error in refused:
        assert error.where.startswith("$"), (seed, error)
        assert error.source == "damaged.json"
        assert error.reason
        assert len(str(error)) < 1000
    # The damage is real, and not everything is refused only because the text is broken.
    assert len(refused) + loaded == NUM_SEEDS
    assert {name for name, _, _ in refused} == {mutation.__name__ for mutation in MUTATIONS}
    assert loaded > 20
    assert sum(error.where != "$" for _, _, error in refused) > 500


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_damage(seed: int) -> None:
    data = encode_plan(full_plan())
    assert all(m(random.Random(seed), data) == m(random.Random(seed), data) for m in MUTATIONS)
