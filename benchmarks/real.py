"""Is the plan that is predicted faster the faster one? ``make bench-real`` runs it.

This machine's CPU is calibrated first (``autoshard calibrate`` on two processes). Each of the models below is planned
on that profile for two devices and three allowances: ample, halfway, and a twentieth above the least peak. Our plans
and all legal baselines are then trained for real on two gloo processes, AdamW, fp32: all plans of a model stand in
memory at once and take turns, so that they share the machine's good and bad moments. A plan is trained once, however
many allowances it fits.

What is asked of the times: over pairs of plans of a model whose predicted times differ by more than 10 %, how often the
measured order is the predicted one; for each model and allowance, the median over rounds of (time of our plan / time of
the baseline that fits and has the least median), with the 95 % interval of that median (order statistics); where the
predicted gain over that baseline is more than 5 %, whether a gain is measured. What is asked of the bytes: live bytes
of rank 0 against the allowance, the least of two steps, since gloo's own threads hold a buffer a little longer now and
then.

A step's time is taken twice: by the clock on the wall, and as the processor time of both ranks' threads. On a machine
that others use too only the second says what a step costs; on cpu nothing overlaps, so it is the same up to waiting.

Results are lines of JSON in ``build/real.jsonl``; the profile is ``build/real-cpu.json``.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing
from tabulate import tabulate
from torch import Tensor, nn

import autoshard
from autoshard.capture.loss import find_loss
from autoshard.errors import InfeasibleBudgetError
from autoshard.pipeline import capture_step, plan_graph
from autoshard.plan import Decisions
from autoshard.planner import baselines
from autoshard.request import Request, resolve
from autoshard.runtime import Meter
from autoshard.simulate import simulate
from autoshard.verify import verify_plan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "real.jsonl"
PROFILE = ROOT / "build" / "real-cpu.json"
PAGE = ROOT / "docs" / "explanation" / "plans.md"
BEGIN, END = "<!-- real:begin -->", "<!-- real:end -->"
WORLD, SEED, VOCAB = 2, 0, 2003
OURS = "autoshard"
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


# -- models


def _ids(rank: int, batch: int, seq: int) -> Tensor:
    return torch.randint(VOCAB, (batch, seq), generator=torch.Generator().manual_seed(rank))


def _language(config: str, model: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(vocab_size=VOCAB, **sizes))

    return build


def _labelled(batch: int, seq: int) -> Callable[[int], Inputs]:
    def make(rank: int) -> Inputs:
        ids = _ids(rank, batch, seq)
        return (), {"input_ids": ids, "labels": ids}

    return make


def _images(rank: int) -> Inputs:
    pixels = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(rank))
    return (), {"pixel_values": pixels, "labels": torch.arange(8) % 2}


class Mlp(nn.Module):
    """Wide layers and few rows: nearly all of the step is communication."""

    def __init__(self, width: int = 1024, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Residual layers and a head."""
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def _rows(rank: int) -> Inputs:
    return (torch.randn(32, 1024, generator=torch.Generator().manual_seed(rank)),), {}


DECODER = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs]]] = {
    "llama": (_language("LlamaConfig", "LlamaForCausalLM", **DECODER), _labelled(2, 128)),
    "gpt2, tied": (
        _language("GPT2Config", "GPT2LMHeadModel", n_embd=256, n_layer=6, n_head=4, use_cache=False),
        _labelled(2, 128),
    ),
    "bert": (
        _language(
            "BertConfig",
            "BertForMaskedLM",
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=4,
        ),
        _labelled(2, 128),
    ),
    "mixtral": (
        _language("MixtralConfig", "MixtralForCausalLM", **{**DECODER, "intermediate_size": 352}, num_local_experts=4),
        _labelled(2, 96),
    ),
    "vit": (
        _language(
            "ViTConfig",
            "ViTForImageClassification",
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
        ),
        _images,
    ),
    "t5": (
        _language(
            "T5Config",
            "T5ForConditionalGeneration",
            d_model=256,
            d_kv=64,
            d_ff=1024,
            num_layers=4,
            num_decoder_layers=4,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
        ),
        _labelled(2, 96),
    ),
    "mlp": (Mlp, _rows),
}


# -- plans


class Way(msgspec.Struct):
    """A plan of a model.

    Attributes:
        names: what it is called: baselines, and ours by the allowances for which it was made.
        decisions: the plan.
        predicted_ns: of a step.
        projected_bytes: its peak.
    """

    names: list[str]
    decisions: Decisions
    predicted_ns: int
    projected_bytes: int


def allowances(loose: int, least: int) -> dict[str, int]:
    """Ample, halfway, and a twentieth above the least peak."""
    return {"ample": 2 * loose, "halfway": (loose + least) // 2, "tight": least + least // 20}


def make_ways(name: str, profile: str) -> tuple[list[Way], dict[str, int]]:
    """All plans of a model, each once, and its allowances."""
    build, make = MODELS[name]
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model = build()
    request = Request(device=profile, devices=WORLD)
    question = resolve(request)
    graph = capture_step(model, make(0), None, "forward", question)
    ways: dict[bytes, Way] = {}

    def add(called: str, decisions: Decisions) -> Way:
        key = msgspec.json.encode(decisions)
        if key not in ways:
            timeline = simulate(graph, decisions, question)
            ways[key] = Way([], decisions, timeline.step_ns, timeline.peak_bytes)
        ways[key].names.append(called)
        return ways[key]

    def ask(**options: Any) -> Decisions:
        return plan_graph(graph, resolve(Request(device=profile, devices=WORLD, **options))).found.decisions

    analysis = plan_graph(graph, question).analysis
    for base in baselines(graph, analysis, question):
        if not any(d.severity == "error" for d in verify_plan(base.decisions, graph, analysis)):
            add(base.name, base.decisions)
    least = simulate(graph, ask(objective="memory"), question).peak_bytes
    least = min([least, *(way.projected_bytes for way in ways.values())])
    known = allowances(max(way.projected_bytes for way in ways.values()), least)
    for called, allowed in known.items():
        try:
            add(f"{OURS}, {called}", ask(memory=allowed))
        except InfeasibleBudgetError as error:
            raise SystemExit(f"{name}, {called}: {error}") from error
    return list(ways.values()), known


# -- runs


@dataclass
class Runner:
    """One plan, ready to train."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Inputs

    def step(self, meter: Meter | None = None) -> None:
        """One training step, measured if there is a meter."""
        args, kwargs = self.inputs
        if meter is None:
            find_loss(self.model(*args, **kwargs), None)[0].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        with meter.step():
            with meter.phase("forward"):
                loss = find_loss(self.model(*args, **kwargs), None)[0]
            with meter.phase("backward"):
                loss.backward()
            with meter.phase("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad()
            del loss


def run_rank(rank: int, folder: str, name: str, ways: list[Way], rounds: int) -> None:
    """Train all plans by turns; rank 0 leaves times and peaks in ``result.json``."""
    with contextlib.suppress(PermissionError):
        os.setsid()  # as torchrun starts its workers; the kernel shares processors out by session
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(minutes=10)
    )
    build, make = MODELS[name]
    runners, peaks = [], []
    for way in ways:
        torch.manual_seed(SEED)
        model = autoshard.apply_plan(build().train(), way.decisions)
        runner = Runner(model, torch.optim.AdamW(model.parameters(), lr=1e-4), make(rank))
        runner.step()
        peaks.append(min(_peak(runner) for _ in range(2)))
        runners.append(runner)
    times: list[list[float]] = [[] for _ in ways]
    worked: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 2):
        # Another one begins each round: whoever comes after a large plan finds other caches.
        for index in (*range(turn % len(ways), len(ways)), *range(turn % len(ways))):
            dist.barrier()
            start, work = time.perf_counter(), time.process_time()
            runners[index].step()
            both = torch.tensor(time.process_time() - work, dtype=torch.float64)
            dist.all_reduce(both)
            if turn >= 2:
                times[index].append(time.perf_counter() - start)
                worked[index].append(both.item() / WORLD)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps({"times": times, "worked": worked, "peaks": peaks}))
    dist.barrier()
    dist.destroy_process_group()


def _peak(runner: Runner) -> int:
    meter = Meter(runner.model, runner.optimizer, runner.inputs)
    runner.step(meter)
    return meter.measurement().peak_bytes


def run_model(name: str, profile: str, rounds: int) -> dict[str, Any]:
    """Plan and train one model; everything that was found."""
    ways, known = make_ways(name, profile)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder, name, ways, rounds), nprocs=WORLD)
        result = json.loads(Path(folder, "result.json").read_text())
    return {
        "model": name,
        "allowances": known,
        "ways": [
            {
                "names": way.names,
                "predicted_s": way.predicted_ns / 1e9,
                "projected_bytes": way.projected_bytes,
                "measured_bytes": int(peak),
                "seconds": seconds,
                "cpu_seconds": worked,
            }
            for way, peak, seconds, worked in zip(ways, result["peaks"], result["times"], result["worked"], strict=True)
        ],
    }


# -- what is found


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of a median from order statistics (binomial with one half)."""
    ordered, n = sorted(values), len(values)
    below = 0.0
    for k in range(n // 2 + 1):
        below += math.comb(n, k) / 2**n
        if below > 0.025:
            return ordered[max(0, k - 1)], ordered[min(n - 1, n - k)]
    return ordered[0], ordered[-1]


def pairs(result: dict[str, Any], clock: str) -> Iterator[tuple[str, str, float, float]]:
    """(plan, plan, predicted ratio, measured ratio) where the predictions differ by more than 10 %."""
    for one, two in itertools.combinations(result["ways"], 2):
        fast, slow = sorted((one, two), key=lambda way: way["predicted_s"])
        predicted = slow["predicted_s"] / fast["predicted_s"]
        if predicted > 1.1:
            ratio = statistics.median(b / a for a, b in zip(fast[clock], slow[clock], strict=True))
            yield fast["names"][0], slow["names"][0], predicted, ratio


@dataclass
class Cell:
    """A model under one allowance: our plan beside the best baseline that fits."""

    model: str
    allowance: str
    baseline: str
    predicted: float
    ratio: float
    low: float
    high: float
    over: float


def cells(result: dict[str, Any], clock: str) -> Iterator[Cell]:
    for called, allowed in result["allowances"].items():
        ours = next(way for way in result["ways"] if f"{OURS}, {called}" in way["names"])
        fitting = [
            way
            for way in result["ways"]
            if way["projected_bytes"] <= allowed and any(not name.startswith(OURS) for name in way["names"])
        ]
        over = ours["measured_bytes"] / allowed - 1
        if not fitting:
            yield Cell(result["model"], called, "none fits", math.nan, math.nan, math.nan, math.nan, over)
            continue
        best = min(fitting, key=lambda way: statistics.median(way[clock]))
        ratios = [a / b for a, b in zip(ours[clock], best[clock], strict=True)]
        low, high = interval(ratios)
        name = next(name for name in best["names"] if not name.startswith(OURS))
        predicted = ours["predicted_s"] / best["predicted_s"]
        yield Cell(result["model"], called, name, predicted, statistics.median(ratios), low, high, over)


CLOCKS = {"cpu_seconds": "processor time", "seconds": "wall clock"}


def report(results: list[dict[str, Any]]) -> str:
    """The tables and the verdicts by both clocks."""
    return "\n\n".join(_report(results, clock, called) for clock, called in CLOCKS.items())


def _report(results: list[dict[str, Any]], clock: str, called: str) -> str:
    found = [cell for result in results for cell in cells(result, clock)]
    compared = [pair for result in results for pair in pairs(result, clock)]
    right = sum(measured > 1 for *_, measured in compared)
    ways = [way for result in results for way in result["ways"]]
    errors = [abs(way["predicted_s"] / statistics.median(way[clock]) - 1) for way in ways]
    table = tabulate(
        [
            (
                cell.model,
                cell.allowance,
                cell.baseline,
                f"{cell.predicted:.3f}",
                f"{cell.ratio:.3f}",
                f"{cell.low:.3f} – {cell.high:.3f}",
                f"{100 * cell.over:+.1f} %",
            )
            for cell in found
        ],
        headers=("model", "allowance", "best baseline that fits", "predicted", "measured", "95 %", "peak / allowed"),
        tablefmt="github",
    )
    timed = [cell for cell in found if not math.isnan(cell.ratio)]
    gains = [cell for cell in timed if cell.predicted < 0.95]
    lines = [
        f"By {called}:",
        "",
        f"- order of pairs that differ by more than 10 %: {right} of {len(compared)} right "
        f"({100 * right / max(1, len(compared)):.1f} %, asked for 90 %)",
        f"- intervals above 1.03: {sum(cell.low > 1.03 for cell in timed)} of {len(timed)} (asked for 0)",
        f"- predicted gains of more than 5 %: {len(gains)}, of which measured as gains: "
        f"{sum(cell.ratio < 1 for cell in gains)}",
        f"- peaks more than 1 % over the allowance: {sum(cell.over > 0.01 for cell in found)} of {len(found)}",
        f"- predicted step against measured: median error {100 * statistics.median(errors):.0f} % of {len(ways)} plans",
        "",
        table,
    ]
    return "\n".join(lines)


def update(results: list[dict[str, Any]]) -> None:
    """Write the report into the page."""
    rounds = len(results[0]["ways"][0]["seconds"])
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    num_plans = sum(len(result["ways"]) for result in results)
    text = f"{rounds} rounds of {num_plans} plans of {len(results)} models.\n\n{report(results)}"
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def calibrate() -> None:
    """Time this machine on two processes."""
    PROFILE.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
    subprocess.run([*command, "-m", "autoshard", "calibrate", "-o", str(PROFILE)], check=True, cwd=ROOT)


def main() -> None:
    """Calibrate, run the models that were asked for, print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="run only these")
    parser.add_argument("--rounds", type=int, default=16, help="measured steps of each plan")
    parser.add_argument("--keep-profile", action="store_true", help="do not calibrate again")
    parser.add_argument("--report", action="store_true", help="only print what the last run found")
    parser.add_argument("--update", action="store_true", help="write what the last run found into the page")
    args = parser.parse_args()
    if not args.report and not args.update:
        if not (args.keep_profile and PROFILE.exists()):
            calibrate()
        RESULTS.unlink(missing_ok=True)
        for name in args.models or MODELS:
            result = run_model(name, str(PROFILE), args.rounds)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(report([result]), "\n", flush=True)
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    print(report(results))
    if args.update:
        update(results)


if __name__ == "__main__":
    main()
