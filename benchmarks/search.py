"""Planning time of large models, capture apart: python benchmarks/search.py [name ...].

Baselines, preparation and the last pricing are included. Each model is built on meta from its published sizes.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from autoshard.analysis import analyze
from autoshard.capture import capture
from autoshard.errors import InfeasibleBudgetError
from autoshard.planner import baselines, search
from autoshard.request import Request, resolve
from autoshard.simulate import profile_step
from autoshard.sizes import format_bytes, format_ns
from autoshard.verify import verify_plan

MODELS = {
    "llama-8b": (dict(hidden=4096, inner=14336, layers=32, heads=32), 8, ("40GB", "50GB", "70GB")),
    "llama-70b": (dict(hidden=8192, inner=28672, layers=80, heads=64), 64, ("40GB", "60GB", "70GB")),
    "llama-405b": (dict(hidden=16384, inner=53248, layers=126, heads=128), 256, ("60GB", "70GB")),
}
"""Sizes, devices and allowances."""


def model_of(hidden: int, inner: int, layers: int, heads: int) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def main() -> None:
    for name in sys.argv[1:] or MODELS:
        sizes, devices, allowances = MODELS[name]
        ids = torch.zeros(1, 8192, dtype=torch.long)
        inputs = ((), {"input_ids": ids, "labels": ids})
        graph = capture(model_of(**sizes), inputs, compute_dtype="bfloat16", device_kind="cuda")
        for memory in allowances:
            question = resolve(Request(device="h100-80gb", devices=devices, memory=memory))
            analysis = analyze(graph, num_shards=question.num_shards)
            started = time.monotonic()
            profile = profile_step(graph, question)
            known = baselines(graph, analysis, question)
            legal = [
                base
                for base in known
                if not any(each.severity == "error" for each in verify_plan(base.decisions, graph, analysis))
            ]
            try:
                found = search(graph, analysis, question, profile, legal)
            except InfeasibleBudgetError as error:
                what = f"infeasible, {format_bytes(error.missing_bytes)} missing"
            else:
                timeline = found.timeline
                what = f"{format_ns(timeline.step_ns)}, {format_bytes(timeline.peak_bytes)}, {found.optimal.status}"
                what += f", gap {100 * found.optimal.gap:.3f} %"
            print(f"{name}, {devices} devices, {memory}: {time.monotonic() - started:.2f} s, {what}", flush=True)


if __name__ == "__main__":
    main()
