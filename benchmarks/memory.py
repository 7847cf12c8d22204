"""Is what is projected what is measured? ``make bench-memory`` runs it.

Each of the models below is sharded in each of the configurations and trained for real on this machine: real tensors on
the CPU, FSDP2's own code through ``apply_plan``, and a fake process group of the plan's size in one process. Measured
is what was alive at once in each phase of a later step, by a dispatch mode that sees every storage; projected is what
the simulation says of the same graph and plan. A cell's error is the difference of a phase's peaks as a part of the
largest measured peak of the step.

Beside it, in one configuration, stands torch's ``FSDPMemTracker`` on the same work: around the first step of a process
(cold: the optimizer's state is not there at first, and the temporaries of DTensor's sharding propagation are counted as
if they had memory) and around the second one (warmed). Not covered: gradient accumulation, and whatever only a device
has (its kernels, fused optimizers, allocator).

Every model has a process of its own. Results are lines of JSON in ``build/memory.jsonl``; each run begins anew.
"""

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from autoshard.analysis import Analysis, analyze
from autoshard.analysis.recompute import may_recompute
from autoshard.capture import capture
from autoshard.capture.loss import find_loss
from autoshard.ir import ModelGraph
from autoshard.plan import Decisions
from autoshard.planner.candidate import Candidate, candidate, decide
from autoshard.planner.cut import first_cut
from autoshard.request import Question, Request, resolve
from autoshard.runtime import Meter, apply_plan
from autoshard.runtime.sandbox import fake_mesh
from autoshard.simulate import Timeline, simulate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "memory.jsonl"
LIMIT_S = 600
VOCAB, HIDDEN, LAYERS, HEADS, SEQ, BATCH = 997, 96, 4, 4, 61, 3
PHASES = ("forward", "backward", "optimizer")
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


# -- models


def _ids(num: int = SEQ) -> Tensor:
    return torch.arange(BATCH * num).reshape(BATCH, num) % VOCAB


def _language(config: str, model: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(vocab_size=VOCAB, **sizes))

    return build


def _labelled() -> Inputs:
    return (), {"input_ids": _ids(), "labels": _ids()}


def _images() -> Inputs:
    return (torch.ones(BATCH, 3, 64, 64),), {"labels": torch.zeros(BATCH, dtype=torch.long)}


def _vectors() -> Inputs:
    return (torch.ones(BATCH * SEQ, HIDDEN),), {}


DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 251,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "use_cache": False,
}
ENCODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 251,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}


class Lora(nn.Module):
    """A frozen linear layer and two thin trained ones."""

    def __init__(self, base: nn.Linear, rank: int = 5) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return self.base(x) + self.up(self.down(x))


def _lora() -> nn.Module:
    model = _language("LlamaConfig", "LlamaForCausalLM", **DECODER)().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = Lora(layer.self_attn.q_proj), Lora(layer.self_attn.v_proj)
    return model


class Seq2Seq(nn.Module):
    """torch's own ``nn.Transformer``, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.transformer = nn.Transformer(HIDDEN, HEADS, 2, 2, 251, dropout=0.1, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The loss of naming the target."""
        hidden = self.transformer(self.embed(source), self.embed(target))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target.flatten())


class Residual(nn.Module):
    """A convolutional block that keeps statistics over batches, so it may not recompute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        return x + F.relu(self.norm(self.conv(x)))


class Convolutional(nn.Module):
    """A stem, blocks at one resolution, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 53, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(53) for _ in range(LAYERS))
        self.head = nn.Linear(53, 211)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Mlp(nn.Module):
    """Two matrices of uneven rows and a scale; adds to its input."""

    def __init__(self, width: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, hidden, bias=False)
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        return x + self.down(F.gelu(self.up(x))) * self.scale


class Tree(nn.Module):
    """Own parameters around children: what is left to a unit between the units inside it."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(HIDDEN, 257), nn.Linear(257, HIDDEN)
        self.inner = nn.ModuleList(Mlp(width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        """A residual, then the children."""
        x = x + self.after(self.before(x))
        for child in self.inner:
            x = child(x)
        return x


def _frozen_half() -> nn.Module:
    model = nn.Sequential(*(Mlp(width) for width in (499, 251, 997, 61)))
    for index in (0, 2):
        model[index].requires_grad_(False)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the table.

    Attributes:
        name: in the table.
        kind: what it stands for.
        build: with random weights.
        inputs: of one step.
        takes_bf16: it runs with parameters in bf16; batch statistics stay in fp32, and on the CPU the two do not meet.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    takes_bf16: bool = True


MODELS = (
    Model(name="llama", kind="dense", build=_language("LlamaConfig", "LlamaForCausalLM", **DECODER), inputs=_labelled),
    Model(
        name="gpt2",
        kind="tied, dropout",
        build=_language(
            "GPT2Config",
            "GPT2LMHeadModel",
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=64,
            use_cache=False,
        ),
        inputs=_labelled,
    ),
    Model(
        name="qwen3",
        kind="tied, norms in attention",
        build=_language("Qwen3Config", "Qwen3ForCausalLM", head_dim=24, tie_word_embeddings=True, **DECODER),
        inputs=_labelled,
    ),
    Model(
        name="mixtral",
        kind="experts",
        build=_language(
            "MixtralConfig",
            "MixtralForCausalLM",
            num_local_experts=4,
            num_experts_per_tok=2,
            **{**DECODER, "intermediate_size": 256},
        ),
        inputs=_labelled,
    ),
    Model(
        name="t5",
        kind="encoder and decoder, tied",
        build=_language(
            "T5Config",
            "T5ForConditionalGeneration",
            d_model=HIDDEN,
            d_kv=24,
            d_ff=251,
            num_layers=2,
            num_heads=HEADS,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        inputs=_labelled,
    ),
    Model(
        name="bert",
        kind="encoder, tied",
        build=_language("BertConfig", "BertForMaskedLM", max_position_embeddings=64, **ENCODER),
        inputs=_labelled,
    ),
    Model(
        name="vit",
        kind="vision",
        build=lambda: _vision("ViTConfig", "ViTForImageClassification", image_size=64, patch_size=8, **ENCODER),
        inputs=_images,
    ),
    Model(
        name="convnext",
        kind="convolutional",
        build=lambda: _vision(
            "ConvNextConfig", "ConvNextForImageClassification", hidden_sizes=[31, 62, 93, 124], depths=[2, 2, 2, 2]
        ),
        inputs=_images,
    ),
    Model(name="residual", kind="batch statistics", build=Convolutional, inputs=_images, takes_bf16=False),
    Model(name="lora", kind="frozen with adapters", build=_lora, inputs=_labelled),
    Model(name="nn.Transformer", kind="torch's own", build=Seq2Seq, inputs=lambda: ((_ids(), _ids()), {})),
    Model(
        name="mlps",
        kind="uneven widths",
        build=lambda: nn.Sequential(*(Mlp(width) for width in (499, 251, 997, 61))),
        inputs=_vectors,
    ),
    Model(
        name="trees",
        kind="parameters between units",
        build=lambda: nn.Sequential(*(Tree(499, 251) for _ in range(3))),
        inputs=_vectors,
    ),
    Model(name="frozen half", kind="frozen blocks", build=_frozen_half, inputs=_vectors),
)


def _vision(config: str, model: str, **sizes: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(num_labels=211, **sizes))


# -- configurations


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How a model is sharded.

    Attributes:
        name: in the table.
        mesh: as in a request.
        precision: as in a request.
        optimizer: as in a request.
        kept: units do not reshard after forward.
        lists: neighbouring units are put together in twos.
        recompute: all blocks that may, recompute.
        root_only: there is one unit.
    """

    name: str
    mesh: str = "8"
    precision: str = "fp32"
    optimizer: str = "adamw"
    kept: bool = False
    lists: bool = False
    recompute: bool = False
    root_only: bool = False


CONFIGURATIONS = (
    Configuration(name="shard 2, fp32", mesh="2"),
    Configuration(name="shard 8, bf16", precision="bf16"),
    Configuration(name="shard 64, bf16", mesh="64", precision="bf16"),
    Configuration(name="kept, fp32", kept=True),
    Configuration(name="list units, bf16", lists=True, precision="bf16"),
    Configuration(name="recompute, bf16", recompute=True, precision="bf16"),
    Configuration(name="recompute, fp32", recompute=True),
    Configuration(name="replicas 2x4, bf16", mesh="2x4", precision="bf16"),
    Configuration(name="root only, momentum", root_only=True, optimizer="sgd-momentum"),
)
TRACKED = "shard 8, bf16"
"""The configuration in which ``FSDPMemTracker`` runs too."""


def make_plan(
    graph: ModelGraph, analysis: Analysis, question: Question, configuration: Configuration
) -> Decisions | None:
    """The decisions of a configuration for a model, ``None`` where it has none of its own."""
    units = [] if configuration.root_only else [(fqn,) for fqn in analysis.order if fqn in first_cut(graph, analysis)]
    if configuration.lists:
        pairs = [(*units[at], *units[at + 1]) for at in range(0, len(units) - 1, 2) if _may_join(analysis, units, at)]
        joined = {module for pair in pairs for module in pair}
        units = [*(unit for unit in units if unit[0] not in joined), *pairs]
        if not pairs:
            return None
    recompute = may_recompute(graph) if configuration.recompute else ()
    if configuration.recompute and not recompute:
        return None
    chosen: Candidate = candidate(units, units if configuration.kept else ())
    decisions = decide(graph, analysis.space, question, chosen)
    return _with(decisions, recompute=recompute)


def _may_join(analysis: Analysis, units: list[tuple[str, ...]], at: int) -> bool:
    return (units[at][0], units[at + 1][0]) in analysis.space.groupable


def _with(decisions: Decisions, **changes: Any) -> Decisions:
    return Decisions(**{name: getattr(decisions, name) for name in Decisions.__struct_fields__} | changes)


# -- one cell


def measure(model: Model, decisions: Decisions, optimizer: str) -> dict[str, int]:
    """Peak bytes by phase of the second of two steps."""
    args, kwargs = model.inputs()
    with fake_mesh(decisions) as mesh:
        torch.manual_seed(0)
        sharded = apply_plan(model.build().train(), decisions, mesh)
        steps = _optimizer(optimizer, sharded)
        find_loss(sharded(*args, **kwargs), None)[0].backward()
        steps.step()
        steps.zero_grad()
        gc.collect()
        meter = Meter(sharded, steps, (args, kwargs))
        with meter.step():
            with meter.phase("forward"):
                loss = find_loss(sharded(*args, **kwargs), None)[0]
            with meter.phase("backward"):
                loss.backward()
            with meter.phase("optimizer"):
                steps.step()
                steps.zero_grad()
        return dict(meter.measurement().peak_by_phase)


def track(model: Model, decisions: Decisions, optimizer: str, num_warm: int) -> int:
    """Peak bytes of a step by torch's ``FSDPMemTracker``, after as many whole steps as are given."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    args, kwargs = model.inputs()
    with fake_mesh(decisions) as mesh:
        torch.manual_seed(0)
        sharded = apply_plan(model.build().train(), decisions, mesh)
        steps = _optimizer(optimizer, sharded)
        for _ in range(num_warm):
            find_loss(sharded(*args, **kwargs), None)[0].backward()
            steps.step()
            steps.zero_grad()
        gc.collect()
        tracker = FSDPMemTracker(sharded, steps)
        tracker.track_inputs((args, kwargs))
        with tracker:
            find_loss(sharded(*args, **kwargs), None)[0].backward()
            steps.step()
            steps.zero_grad()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def project(graph: ModelGraph, decisions: Decisions, question: Question) -> tuple[Timeline, float]:
    """The projection, and the seconds that a further one takes."""
    timeline = simulate(graph, decisions, question)
    start = time.perf_counter()
    simulate(graph, decisions, question)
    return timeline, time.perf_counter() - start


def cells(model: Model, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """One line of JSON for each configuration of a model."""
    graphs: dict[str, ModelGraph] = {}
    for configuration in CONFIGURATIONS:
        if configuration.name not in names or (configuration.precision == "bf16" and not model.takes_bf16):
            continue
        request = Request(
            device="cpu",
            devices=None,
            mesh=configuration.mesh,
            precision=configuration.precision,
            optimizer=configuration.optimizer,
        )
        question = resolve(request)
        dtype = question.compute_dtype
        if dtype not in graphs:
            graphs[dtype] = capture(model.build(), model.inputs(), compute_dtype=dtype)
        graph = graphs[dtype]
        analysis = analyze(graph, num_shards=question.num_shards)
        decisions = make_plan(graph, analysis, question, configuration)
        line: dict[str, Any] = {"model": model.name, "kind": model.kind, "configuration": configuration.name}
        if decisions is None:
            yield {**line, "state": "not there"}
            continue
        timeline, seconds = project(graph, decisions, question)
        line |= {
            "state": "measured",
            "num_units": len(decisions.units),
            "num_recompute": len(decisions.recompute),
            "projected": {phase: timeline.phase_peak_bytes(phase) for phase in PHASES},
            "measured": measure(model, decisions, configuration.optimizer),
            "project_seconds": seconds,
        }
        yield line


def trackers(model: Model) -> dict[str, Any]:
    """What ``FSDPMemTracker`` says in a process that has run no step, and after one."""
    (configuration,) = (one for one in CONFIGURATIONS if one.name == TRACKED)
    question = resolve(Request(device="cpu", mesh=configuration.mesh, precision=configuration.precision))
    graph = capture(model.build(), model.inputs(), compute_dtype=question.compute_dtype)
    decisions = make_plan(graph, analyze(graph, num_shards=question.num_shards), question, configuration)
    assert decisions is not None
    found: dict[str, Any] = {"model": model.name, "state": "tracked"}
    for name, num_warm in (("cold", 0), ("warmed", 1)):
        try:
            start = time.perf_counter()
            found[name] = track(model, decisions, configuration.optimizer, num_warm)
            found[f"{name}_seconds"] = time.perf_counter() - start
        except Exception as error:  # what it does not support, it raises in many ways
            found[name], found[f"{name}_error"] = 0, f"{type(error).__name__}: {error}"
    return found


# -- all cells


def main() -> int:
    """Measure all cells, print the tables; 1 if some model failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS], help="only these")
    parser.add_argument("--configurations", nargs="*", default=[one.name for one in CONFIGURATIONS], help="only these")
    parser.add_argument("--no-tracker", action="store_true", help="leave FSDPMemTracker out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--one", metavar="MODEL", help="measure one model here and print its lines")
    parser.add_argument("--track", metavar="MODEL", help="run FSDPMemTracker on one model here and print its line")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    by_name = {model.name: model for model in MODELS}
    if args.one:
        for line in cells(by_name[args.one], args.configurations):
            print(json.dumps(line), flush=True)
        return 0
    if args.track:
        print(json.dumps(trackers(by_name[args.track])), flush=True)
        return 0
    lines: list[dict[str, Any]] = []
    for name in args.models:
        lines += _in_a_process("--one", name, args.configurations)
        if not args.no_tracker and by_name[name].takes_bf16:
            lines += _in_a_process("--track", name, ())
        print(f"{name}: {sum(1 for line in lines if line['model'] == name)} lines", file=sys.stderr, flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(format_results(lines))
    return int(any(line["state"] == "failed" for line in lines))


def _in_a_process(option: str, name: str, configurations: Iterable[str]) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, option, name]
    if configurations:
        command += ["--configurations", *configurations]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        lines.append({"model": name, "state": "failed", "configuration": option, "message": last})
    return lines


def errors(line: dict[str, Any]) -> dict[str, float]:
    """Projected minus measured by phase, as a part of the step's measured peak."""
    whole = max(line["measured"].values())
    return {phase: (line["projected"][phase] - line["measured"][phase]) / whole for phase in PHASES}


def format_results(lines: list[dict[str, Any]]) -> str:
    """The tables and the sums."""
    measured = [line for line in lines if line["state"] == "measured"]
    names = list(dict.fromkeys(line["configuration"] for line in measured))
    found = {(line["model"], line["configuration"]): errors(line) for line in measured}
    rows = []
    for model in dict.fromkeys(line["model"] for line in lines):
        cell = [found.get((model, name)) for name in names]
        rows.append([model, *("–" if one is None else _worst(one) for one in cell)])
    text = ["error of the projected peaks by model and configuration: the worst of the three phases, in %", ""]
    text.append(tabulate(rows, headers=["", *names], stralign="right", disable_numparse=True))
    every = [error for one in found.values() for error in one.values()]
    peaks = [_peak_error(line) for line in measured]
    if every:
        text += [
            "",
            f"{len(measured)} cells, {len(every)} peaks; error of a cell's peak: worst {_percent(_largest(peaks))}, "
            f"median {_percent(statistics.median(map(abs, peaks)))}",
            f"error of a phase: worst {_percent(_largest(every))}, median "
            f"{_percent(statistics.median(map(abs, every)))}, lowest {_percent(min(every))}, highest "
            f"{_percent(max(every))}",
            f"a projection takes {1000 * statistics.median(line['project_seconds'] for line in measured):.2f} ms "
            "(median; the profile of the step once before)",
        ]
    text += _tracker_lines(lines, measured)
    failed = [line for line in lines if line["state"] == "failed"]
    text += ["", *(f"failed: {line['model']} ({line['configuration']}): {line['message']}" for line in failed)]
    text.append(f"memory of this process at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")
    return "\n".join(text)


def _tracker_lines(lines: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[str]:
    ours = {line["model"]: line for line in measured if line["configuration"] == TRACKED}
    rows = []
    for line in lines:
        if line["state"] != "tracked" or line["model"] not in ours:
            continue
        own = ours[line["model"]]
        peak = max(own["measured"].values())
        row = [line["model"], peak, _percent(_peak_error(own))]
        for name in ("warmed", "cold"):
            row.append(_percent(line[name] / peak - 1) if line[name] else line[f"{name}_error"][:60])
        seconds = line.get("warmed_seconds")
        row.append(f"{seconds / own['project_seconds']:.0f}" if seconds else "–")
        rows.append(row)
    if not rows:
        return []
    headers = ["", "measured bytes", "projected", "tracker, warmed", "tracker, cold", "tracker's time / projection's"]
    title = f"beside torch's FSDPMemTracker, error of the step's peak ({TRACKED})"
    return ["", title, "", tabulate(rows, headers=headers, stralign="right", disable_numparse=True)]


def _peak_error(line: dict[str, Any]) -> float:
    return max(line["projected"].values()) / max(line["measured"].values()) - 1


def _largest(values: list[float]) -> float:
    return max(values, key=abs)


def _worst(by_phase: dict[str, float]) -> str:
    return f"{100 * _largest(list(by_phase.values())):+.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:+.3f} %"


if __name__ == "__main__":
    sys.exit(main())
