"""What is gained over what people use today, under the cost model? ``make bench-plans`` runs it.

Each of the models below is captured once and planned in five worlds for three allowances: what the device allows,
halfway from there (or from the peak of one unit a block without recompute, if that is lower) to the least peak of any
plan, and a twentieth above that least peak. Our plan and every legal baseline are priced by the same fold. Nothing here
is measured on a device: gains are gains under the cost model.

Results are lines of JSON in ``build/plans.jsonl``; ``--update`` writes the summary into ``docs/explanation/plans.md``.
"""

import argparse
import functools
import json
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from autoshard.errors import InfeasibleBudgetError
from autoshard.pipeline import Answer
from autoshard.request import Request
from autoshard.studies import Subject

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "plans.jsonl"
PAGE = ROOT / "docs" / "explanation" / "plans.md"
BEGIN, END = "<!-- plans:begin -->", "<!-- plans:end -->"

WORLDS = {
    "8 x H100": ("h100-80gb", 8),
    "64 x H100, 8 x 400 Gb/s a node": ("h100-80gb", 64),
    "8 x A100-40GB": ("a100-40gb", 8),
    "4 x L40S, PCIe": ("l40s", 4),
    "16 x B200": ("b200", 16),
}


def _config(config: str, model: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**sizes))

    return build


def _decoder(hidden: int, inner: int, layers: int, heads: int, groups: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "use_cache": False,
        **more,
    }


def _tokens(batch: int, seq: int) -> Callable[..., Any]:
    def make(given: int | None, length: int | None) -> Any:
        ids = torch.zeros(given or batch, length or seq, dtype=torch.long)
        return (), {"input_ids": ids, "labels": ids}

    return make


def _pixels(batch: int, edge: int) -> Callable[..., Any]:
    def make(given: int | None, length: int | None) -> Any:
        return (), {
            "pixel_values": torch.zeros(given or batch, 3, edge, edge),
            "labels": torch.zeros(given or batch).long(),
        }

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "Llama-3.2-1B": (
        _config("LlamaConfig", "LlamaForCausalLM", **_decoder(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True)),
        _tokens(4, 4096),
    ),
    "Llama-3.1-8B": (
        _config("LlamaConfig", "LlamaForCausalLM", **_decoder(4096, 14336, 32, 32, 8, 128256)),
        _tokens(1, 4096),
    ),
    "Llama-3.1-70B": (
        _config("LlamaConfig", "LlamaForCausalLM", **_decoder(8192, 28672, 80, 64, 8, 128256)),
        _tokens(1, 4096),
    ),
    "Mistral-7B": (
        _config("MistralConfig", "MistralForCausalLM", **_decoder(4096, 14336, 32, 32, 8, 32000)),
        _tokens(1, 2048),
    ),
    "Qwen2.5-14B": (
        _config("Qwen2Config", "Qwen2ForCausalLM", **_decoder(5120, 13824, 48, 40, 8, 152064)),
        _tokens(1, 4096),
    ),
    "Phi-3-mini": (
        _config("Phi3Config", "Phi3ForCausalLM", **_decoder(3072, 8192, 32, 32, 32, 32064)),
        _tokens(2, 4096),
    ),
    "Mixtral-8x7B": (
        _config("MixtralConfig", "MixtralForCausalLM", **_decoder(4096, 14336, 32, 32, 8, 32000)),
        _tokens(1, 2048),
    ),
    "GPT-2-XL": (
        _config("GPT2Config", "GPT2LMHeadModel", n_embd=1600, n_layer=48, n_head=25, use_cache=False),
        _tokens(8, 1024),
    ),
    "BERT-large": (
        _config(
            "BertConfig",
            "BertForMaskedLM",
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
        ),
        _tokens(32, 512),
    ),
    "T5-large": (
        _config(
            "T5Config",
            "T5ForConditionalGeneration",
            vocab_size=32128,
            d_model=1024,
            d_kv=64,
            d_ff=4096,
            num_layers=24,
            num_decoder_layers=24,
            num_heads=16,
            decoder_start_token_id=0,
            use_cache=False,
        ),
        _tokens(8, 512),
    ),
    "ViT-H/14": (
        _config(
            "ViTConfig",
            "ViTForImageClassification",
            hidden_size=1280,
            intermediate_size=5120,
            num_hidden_layers=32,
            num_attention_heads=16,
            image_size=224,
            patch_size=14,
        ),
        _pixels(32, 224),
    ),
}


def make_subject(name: str) -> Subject:
    build, make = MODELS[name]
    with torch.device("meta"):
        model = build()
    return Subject(model, make)


def _ask(subject: Subject, device: str, devices: int, **options: Any) -> Answer:
    return subject.ask(Request(device=device, devices=devices, **options))


def cells(name: str, subject: Subject) -> Iterator[dict[str, Any]]:
    """One row for each world and allowance."""
    for world, (device, devices) in WORLDS.items():
        ask = functools.partial(_ask, subject, device, devices)
        allowed = subject.question(Request(device=device, devices=devices)).allowed_bytes
        try:
            smallest = ask(objective="memory")
        except InfeasibleBudgetError as error:
            yield {
                "model": name,
                "world": world,
                "allowance": "device",
                "least_bytes": error.smallest_bytes,
                "fits": False,
            }
            continue
        peaks = [base.peak_bytes for base in smallest.alternatives if base.peak_bytes]
        least = min([smallest.found.timeline.peak_bytes, *peaks])
        plain = next(base for base in smallest.alternatives if base.name == "per block by class name")
        ample = min(allowed, plain.peak_bytes or allowed)
        known = {"device": allowed, "halfway": (least + ample) // 2, "tight": min(allowed, least + least // 20)}
        for allowance, memory in known.items():
            start = time.process_time()
            answer = ask(memory=memory)
            seconds = time.process_time() - start
            found = answer.found
            yield {
                "model": name,
                "world": world,
                "allowance": allowance,
                "fits": True,
                "allowed_bytes": memory,
                "step_ns": found.timeline.step_ns,
                "peak_bytes": found.timeline.peak_bytes,
                "exposed_ns": found.timeline.exposed_ns,
                "optimal": found.optimal.status,
                "gap": found.optimal.gap,
                "planning_cpu_s": round(seconds, 3),
                "baselines": {
                    base.name: {"verdict": base.verdict, "step_ns": base.step_ns, "peak_bytes": base.peak_bytes}
                    for base in answer.alternatives
                },
            }


# -- what is found


def fitting(cell: dict[str, Any]) -> dict[str, int]:
    """Step of each baseline that fits the cell's allowance."""
    return {name: base["step_ns"] for name, base in cell["baselines"].items() if base["verdict"] == "fits"}


def mean(ratios: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def cell_table(found: list[dict[str, Any]]) -> str:
    """Every cell."""
    rows = []
    for cell in found:
        start = (cell["model"], cell["world"], cell["allowance"])
        if not cell["fits"]:
            rows.append((*start, f"needs {cell['least_bytes'] / 1e9:.1f} GB", "", "", "", "infeasible"))
            continue
        others = fitting(cell)
        best = min(others, key=lambda name: others[name], default="none fits")
        gain = f"{others[best] / cell['step_ns']:.3f}" if others else "–"
        state = cell["optimal"] + (f" {100 * cell['gap']:.2f} %" if cell["optimal"] == "bounded" else "")
        rows.append(
            (
                *start,
                f"{cell['allowed_bytes'] / 1e9:.1f}",
                f"{cell['peak_bytes'] / 1e9:.1f}",
                f"{cell['step_ns'] / 1e6:.1f}",
                f"{gain} {best}",
                state,
            )
        )
    headers = (
        "model",
        "world",
        "allowance",
        "allowed GB",
        "peak GB",
        "step ms",
        "gain over the best baseline",
        "optimal",
    )
    return tabulate(rows, headers=headers, tablefmt="github")


def summary(found: list[dict[str, Any]]) -> str:
    """Means, counts and the bars."""
    feasible = [cell for cell in found if cell["fits"]]
    best = [min(others.values()) / cell["step_ns"] for cell in feasible if (others := fitting(cell))]
    each: dict[str, list[float]] = defaultdict(list)
    by_world: dict[str, list[float]] = defaultdict(list)
    by_allowance: dict[str, list[float]] = defaultdict(list)
    for cell in feasible:
        others = fitting(cell)
        for name, step in others.items():
            each[name].append(step / cell["step_ns"])
        if others:
            by_world[cell["world"]].append(min(others.values()) / cell["step_ns"])
            by_allowance[cell["allowance"]].append(min(others.values()) / cell["step_ns"])
    alone = sum(not fitting(cell) for cell in feasible)
    slower = sum(any(step < cell["step_ns"] for step in fitting(cell).values()) for cell in feasible)
    cpu = sorted(cell["planning_cpu_s"] for cell in feasible)
    proved = sum(cell["optimal"] == "proved" for cell in feasible)
    gaps = sorted(cell["gap"] for cell in feasible if cell["optimal"] == "bounded")
    rows = [("the best baseline that fits", f"{mean(best):.4f}", f"{max(best, default=math.nan):.3f}", str(len(best)))]
    rows += [(name, f"{mean(of):.4f}", f"{max(of):.3f}", str(len(of))) for name, of in each.items()]
    worlds = [
        (name, f"{mean(of):.4f}", f"{max(of):.3f}", str(len(of)))
        for name, of in (*by_world.items(), *by_allowance.items())
    ]
    lines = [
        f"{len(feasible)} cells have a plan ({len(found) - len(feasible)} worlds are too small for their model); in "
        f"{alone} of them no baseline fits; our plan is slower than a baseline that fits in {slower}.",
        "",
        f"Proved best within the search space under the cost model: {proved} of {len(feasible)}"
        + (
            f"; the other gaps are {100 * gaps[len(gaps) // 2]:.2f} % in the median and at most {100 * gaps[-1]:.2f} %."
            if gaps
            else "."
        ),
        f"Planning takes {cpu[len(cpu) // 2]:.2f} s of CPU in the median and at most {cpu[-1]:.2f} s, capture apart, "
        "baselines included.",
        "",
        tabulate(rows, headers=("time of … over ours", "geometric mean", "largest", "cells"), tablefmt="github"),
        "",
        tabulate(
            worlds,
            headers=("the best baseline that fits, in …", "geometric mean", "largest", "cells"),
            tablefmt="github",
        ),
    ]
    return "\n".join(lines)


def update(found: list[dict[str, Any]]) -> None:
    """Write the summary and the cells into the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    text = f"{summary(found)}\n\n{cell_table(found)}"
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Plan all models that were asked for and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"only these of {', '.join(MODELS)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the lines of JSON go, or come from")
    parser.add_argument("--update", action="store_true", help="write the last run into the page")
    args = parser.parse_args()
    if not args.update:
        warnings.simplefilter("ignore")
        args.results.parent.mkdir(exist_ok=True)
        args.results.unlink(missing_ok=True)
        for name in args.models or MODELS:
            start = time.perf_counter()
            subject = make_subject(name)
            rows = []
            for row in cells(name, subject):
                rows.append(row)
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{cell_table(rows)}\n{time.perf_counter() - start:.0f} s\n", flush=True)
    found = [json.loads(line) for line in args.results.read_text().splitlines()]
    print(summary(found))
    if args.update:
        update(found)


if __name__ == "__main__":
    main()
