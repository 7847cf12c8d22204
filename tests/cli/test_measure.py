"""``autoshard measure``: a real model under a real plan in one process, and how the comparison is told."""

import json
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoshard.cli.measure import Row, compare, format_comparison, free_bytes, require_memory
from autoshard.errors import RequestError
from autoshard.pipeline import plan_model_file
from autoshard.plan import Plan, save_plan
from autoshard.plan.measurement import Measurement
from autoshard.request import Request, resolve
from autoshard.simulate import Timeline, simulate
from tests.graphs import build, chain
from tests.plans import small_plan
from tests.simulate.measured import decisions

MODEL = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 61), nn.Linear(61, 16)

        def forward(self, x):
            return x + self.down(self.up(x).relu())

    def build_model():
        return nn.Sequential(*(Block() for _ in range(3)))

    def example_inputs(batch=None, seq=None):
        return (torch.ones(batch or 7, 16),), {}

    def loss(outputs):
        return outputs.square().mean()
    """


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(textwrap.dedent(MODEL))
    return str(path)


@pytest.fixture(scope="module")
def plan(model: str) -> Plan:
    return plan_model_file(model, Request(device="cpu", devices=4, optimizer="sgd-momentum")).plan


@pytest.fixture
def saved(plan: Plan, tmp_path: Path) -> Path:
    save_plan(plan, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_projected_is_measured(cli, model: str, saved: Path, plan: Plan) -> None:
    done = cli("measure", saved, model, "--json", "--steps", "3")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["group"], found["measurement"]["num_devices"], found["measurement"]["num_steps"]) == ("fake", 4, 3)
    rows = {row["name"]: (row["projected"], row["measured"]) for row in found["rows"]}
    peaks = [measured for name, (_, measured) in rows.items() if name.startswith("peak")]
    assert len(peaks) == 3
    assert found["planned_peak_bytes"] == plan.projection.peak_bytes
    for name, (projected, measured) in rows.items():
        assert measured == pytest.approx(projected, rel=0.005), name
    # By hand: 3 blocks of 61 * 16 and 16 * 61 weights, whose rows divide by 4 or are padded to 64, and their biases.
    assert rows["parameters"][1] == 4 * 3 * (16 * 16 + 4 * 61 + 16 + 4)
    assert rows["optimizer state"][1] == rows["gradients"][1] == rows["parameters"][1]
    assert rows["inputs and buffers"][1] == 4 * 7 * 16

    # What the highest peak is made of is told by who allocated it.
    phase = found["measurement"]["peak_phase"]
    kinds = {name.partition(" peak, ")[2]: both for name, both in rows.items() if name.startswith(f"{phase} peak")}
    assert {"sharded params", "optimizer state", "activations"} <= set(kinds)
    assert sum(size for _, size in kinds.values()) == found["measurement"]["peak_bytes"]
    assert found["measurement"]["allocator"] == {}


def test_a_configuration_is_measured(cli, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 56,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 67,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config, plan = tmp_path / "config.json", tmp_path / "plan.json"
    options = ("--device", "cpu", "--devices", "4", "--batch", "2", "--seq", "11", "--quiet")
    assert cli("plan", config, "-o", plan, *options).code == 0
    done = cli("measure", plan, config, "--batch", "2", "--seq", "11", "--json", "--steps", "1")
    assert done.code == 0, done.err
    rows = {row["name"]: (row["projected"], row["measured"]) for row in json.loads(done.out)["rows"]}
    for name, (projected, measured) in rows.items():
        assert measured == pytest.approx(projected, rel=0.02), name


def test_the_allocator_of_a_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA's counters: there is no device here."""
    from autoshard.runtime.allocator import allocator_figures, restart_allocator

    began = []
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: began.append(True))
    monkeypatch.setattr(
        "torch.cuda.memory_stats",
        lambda: {"allocated_bytes.all.peak": 3072, "requested_bytes.all.peak": 3001, "num_alloc_retries": 2},
    )
    restart_allocator("cpu")
    assert (allocator_figures("cpu"), began) == ({}, [])
    restart_allocator("cuda")
    figures = allocator_figures("cuda")
    assert began == [True]
    assert (figures["allocated_peak"], figures["requested_peak"], figures["num_retries"]) == (3072, 3001, 2)
    timeline, measurement, _ = measured()
    told = msgspec.structs.replace(measurement, allocator=figures)
    text = format_comparison(small_plan(), told, "nccl", compare(timeline, told))
    assert "the device's allocator: allocated peak 3.00 KiB, requested peak 2.93 KiB" in text
    assert "num retries 2" in text


def test_text(cli, model: str, saved: Path) -> None:
    done = cli("measure", saved, model, "--batch", "11")
    assert done.code == 0, done.err
    assert done.out.startswith("measured on cpu, rank 0 of 4 (fake process group), 2 steps: peak ")
    assert "peak, backward" in done.out
    assert "all-reduces" not in done.out


def test_a_plan_for_another_model(cli, saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(textwrap.dedent(MODEL).replace("61", "59"))
    done = cli("measure", saved, other)
    assert done.code == 5
    assert "does not match" in done.err


def test_a_group_is_left_behind_nowhere(cli, model: str, saved: Path, tmp_path: Path) -> None:
    import torch.distributed as dist

    cli("measure", saved, tmp_path / "missing.py")
    cli("measure", saved, model)
    assert not dist.is_initialized()


def test_too_large(cli, model: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.cli.measure.free_bytes", lambda: 20_000)
    done = cli("measure", saved, model)
    assert done.code == 2
    assert "19.5 KiB are free" in done.err
    assert "torchrun" in done.err


def test_memory_is_compared_with_what_is_free() -> None:
    require_memory(900, 1000, "model.py")
    require_memory(10**18, None, "model.py")
    with pytest.raises(RequestError, match=r"model\.py, which needs 901 B"):
        require_memory(901, 1000, "model.py")
    free = free_bytes()
    assert free is None or 2**20 < free < 2**50


def test_an_unknown_optimizer(cli, model: str, saved: Path, plan: Plan, tmp_path: Path) -> None:
    provenance = msgspec.structs.replace(plan.provenance, optimizer="lion")
    save_plan(msgspec.structs.replace(plan, provenance=provenance), tmp_path / "lion.json")
    done = cli("measure", tmp_path / "lion.json", model)
    assert done.code == 2
    assert "'lion'" in done.err


MEASUREMENT = Measurement(
    device="cpu",
    rank=0,
    num_devices=2,
    num_steps=2,
    peak_bytes=2003,
    peak_phase="backward",
    peak_by_phase={"forward": 1009, "backward": 2003},
    parameter_bytes=101,
    gradient_bytes=103,
    optimizer_bytes=107,
    other_bytes=0,
    num_all_gathers=3,
    num_reduce_scatters=2,
    num_all_reduces=1,
    all_gather_bytes=13,
    reduce_scatter_bytes=17,
    all_reduce_bytes=19,
)


def measured(*_: Any, **__: Any) -> tuple[Timeline, Measurement, str]:
    """In place of a measured model file."""
    plan = decisions(("0",), ("1",), shards=2)
    timeline = simulate(build(chain(10, 14)), plan, resolve(Request(device="cpu", devices=2)))
    return timeline, MEASUREMENT, "fake"


def test_rows() -> None:
    timeline, measurement, _ = measured()
    rows = {row.name: row for row in compare(timeline, measurement)}
    assert rows["peak, backward"] == Row(
        name="peak, backward", projected=timeline.phase_peak_bytes("backward"), measured=2003
    )
    assert (rows["parameters"].projected, rows["parameters"].measured) == (4 * (5 + 7), 101)
    assert (rows["gradients"].projected, rows["gradients"].measured) == (4 * (5 + 7), 103)
    assert rows["all-gathers, number"] == Row(
        name="all-gathers, number", projected=len(list(timeline.collectives())) - 2, measured=3, is_bytes=False
    )
    # A collective that nobody projected is shown, without a ratio.
    assert (rows["all-reduces, bytes"].measured, rows["all-reduces, bytes"].ratio) == (19, None)


def test_the_verdict_is_of_the_largest_phase() -> None:
    rows = (
        Row(name="peak, forward", projected=1000, measured=1009),
        Row(name="peak, backward", projected=2000, measured=2003),
    )
    text = format_comparison(small_plan(), MEASUREMENT, "gloo", rows)
    assert text.splitlines()[0].endswith("peak 1.96 KiB, projected 1.95 KiB (+0.15 %)")
    assert "1.0090" in text
    assert "gloo holds" in text
