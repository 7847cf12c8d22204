"""How long a projection takes, beside torch's FSDPMemTracker on the same plan: ``make bench-replay``.

Llama-3.1-8B under the plan of ``plans/``, and the 126 layers of Llama-3.1-405B under a plan of one unit a layer. Both
times are seconds of CPU in this process. A replay is the whole of ``simulate``; the profile of the captured step, which
is made once for a model, is told apart. The tracker follows one step of the sharded model on fake tensors, after a
first one that is not followed, so that it is not charged for what torch does once in a process.
"""

import gc
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from autoshard.analysis import analyze
from autoshard.capture import capture
from autoshard.ir import ModelGraph
from autoshard.plan import Decisions, load_plan
from autoshard.planner.candidate import candidate, decide
from autoshard.planner.cut import first_cut
from autoshard.request import Question, Request, resolve
from autoshard.runtime import apply_plan
from autoshard.runtime.sandbox import fake_mesh
from autoshard.simulate import profile_step, simulate
from plans.llama_3_1_8b import build_model, example_inputs

PLAN = Path(__file__).resolve().parent.parent.parent / "plans" / "llama_3_1_8b.json"
SEQ = 512
REPEATS = 30


def main() -> int:
    """Measure and print."""
    warnings.simplefilter("ignore")
    plan = load_plan(PLAN)
    graph = _captured(_on_meta(build_model))
    question = resolve(Request(device="h100-80gb", devices=plan.num_devices))
    seconds = _replay("Llama-3.1-8B", graph, plan, question)
    deep = _captured(_on_meta(_deep))
    question = resolve(Request(device="h100-80gb", devices=512))
    analysis = analyze(deep, num_shards=question.num_shards)
    cut = candidate((fqn,) for fqn in first_cut(deep, analysis))
    _replay("126 layers", deep, decide(deep, analysis.space, question, cut), question)
    tracked, peak = _track(plan)
    print(
        f"FSDPMemTracker on Llama-3.1-8B: {tracked:.1f} s of CPU for a step, {tracked / seconds:.0f} times a replay; "
        f"its peak is {peak / 2**30:.2f} GiB"
    )
    return 0


def _on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build()
    return model


def _deep() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _captured(model: nn.Module) -> ModelGraph:
    return capture(model, example_inputs(1, SEQ), compute_dtype="bfloat16", device_kind="cuda")


def _replay(name: str, graph: ModelGraph, plan: Decisions, question: Question) -> float:
    start = time.process_time()
    profile = profile_step(graph, question, plan.recompute)
    once = time.process_time() - start
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        timeline = simulate(graph, plan, question, profile)
        seconds.append(time.process_time() - start)
    found = statistics.median(seconds)
    print(
        f"{name}: {len(plan.units)} units, {len(timeline.events)} events: a replay takes {1000 * found:.2f} ms of CPU "
        f"(median of {REPEATS}; least {1000 * min(seconds):.2f}), the profile {1000 * once:.0f} ms once; peak "
        f"{timeline.peak_bytes / 2**30:.2f} GiB",
        flush=True,
    )
    return found


def _track(plan: Decisions) -> tuple[float, int]:
    """Seconds for a step under the tracker, and its peak."""
    args, kwargs = example_inputs(1, SEQ)
    with fake_mesh(plan) as mesh:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            model = build_model()
        apply_plan(model, plan, mesh)
        with mode:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

            def step() -> None:
                model(*args, **kwargs).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            step()
            gc.collect()
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((args, kwargs))
            start = time.process_time()
            with tracker:
                step()
            seconds = time.process_time() - start
            return seconds, int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


if __name__ == "__main__":
    sys.exit(main())
