"""What could not be compared with a device is named with its size, counted by hand."""

from dataclasses import replace

from autoshard.request import Question, Request, resolve
from autoshard.simulate import not_modelled, simulate
from tests.graphs import build, chain
from tests.simulate.measured import decisions

PLAN = decisions(("0",), ("1",), shards=4)


def _question(device: str = "h100-80gb", optimizer: str = "sgd") -> Question:
    return resolve(Request(device=device, devices=4, precision="fp32", optimizer=optimizer))


def _phrases(question: Question) -> tuple[str, ...]:
    graph = build(chain(97, 211))
    return not_modelled(simulate(graph, PLAN, question), graph, question)


def test_on_cpu_there_is_no_device_to_compare_with() -> None:
    assert _phrases(_question("cpu")) == ("scratch memory that kernels allocate for themselves", "skew between ranks")


def test_headroom_has_its_size_and_rounding_is_counted() -> None:
    question = _question(optimizer="adamw")
    timeline = simulate(build(chain(97, 211)), PLAN, question)
    assert timeline.peak_at == "backward, unit 1: reduce-scatter input"
    assert timeline.by_kind["activations"] == 64  # the gradient of unit 0's output
    rounding, *headroom = _phrases(question)[:-1]
    # Each of two parameters sharded and whole, with a gradient and two moments, and the activations at the peak.
    count = 2 * 2 + 2 * 3 + 1
    expected = f"rounding of the allocator, at most {512 * count / 1024:.2f} KiB for {count} tensors at the peak"
    assert rounding == f"not compared with a device: {expected}"
    assert [text.rpartition(", ")[2] for text in headroom] == [
        "headroom 640 MiB",
        "headroom 1.00 GiB",
        "headroom 4.00 GiB",
    ]


def test_attention_kernels_and_what_they_make() -> None:
    question = _question()
    graph = build(chain(97, 211))
    region = graph.root
    first = replace(region.forward[0], target="aten._scaled_dot_product_flash_attention.default")
    made = sum(region.storages[index].nbytes for index in first.outputs)
    graph = replace(graph, regions=(replace(region, forward=(first, *region.forward[1:])),))
    phrases = not_modelled(simulate(graph, PLAN, question), graph, question)
    assert phrases[0].startswith(f"not compared with a device: attention kernels (flash), which make {made} B")


def test_optimizers_that_only_a_device_has_in_that_form() -> None:
    assert "the fused optimizer, 0 B" in _phrases(_question(optimizer="adamw-fused"))[1]
    assert "8-bit optimizer, 424 B" in _phrases(_question(optimizer="adamw-8bit"))[1]  # two of 53 float32 elements
