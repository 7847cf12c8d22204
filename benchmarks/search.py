"""Planning time of large models, capture apart: python -m benchmarks.search [name ...].

Analysis, profiles, baselines, the search, verification and the last pricing are included: all that follows capture. The
times are seconds of CPU in this process, where each model has been captured once before; each is built on meta from its
published sizes. What collectives take over what ops take says how far a step is from being bound by communication.
"""

import sys
import time
import warnings

import torch
import transformers

from autoshard.capture import capture
from autoshard.errors import InfeasibleBudgetError
from autoshard.pipeline import Answer, plan_graph
from autoshard.request import Request, resolve
from autoshard.sizes import format_bytes, format_ns
from benchmarks.scale.cases import CONFIGS

MODELS = {
    "llama-3.1-8b": (1, 8192, (("h100-80gb", 8, ("40GB", "50GB", None)),)),
    "llama-3.1-70b": (1, 8192, (("h100-80gb", 64, ("40GB", None)), ("h100-80gb", 512, (None,)))),
    "llama-3.1-405b": (1, 8192, (("h100-80gb", 512, (None,)), ("b200", 256, (None,)))),
    "deepseek-v3": (1, 4096, (("h200", 2048, (None,)), ("b200", 1024, (None,)))),
}
"""Batch, tokens, and the devices with their allowances, ``None`` for what they have."""


def model_of(name: str) -> torch.nn.Module:
    """The model of a configuration, on meta."""
    config = dict(CONFIGS[name])
    kind, architecture = config.pop("model_type"), config.pop("architectures")[0]
    with torch.device("meta"):
        model: torch.nn.Module = getattr(transformers, architecture)(
            transformers.AutoConfig.for_model(kind, **config, use_cache=False)
        )
    return model


def communication(answer: Answer) -> float:
    """Time of all collectives over that of all ops, for one unit a block that reshards."""
    setup = answer.found.timeline.setup
    wire = 0
    for unit in setup.units:
        wire += (1 + unit.reshard) * unit.gather_ns
        reduction = unit.reduction([key for key, _ in unit.gradients])
        wire += reduction.reduce_scatter_ns if reduction is not None else 0
    return wire / setup.profile.compute_ns


def main() -> None:
    """Plan each and print."""
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or MODELS:
        batch, seq, worlds = MODELS[name]
        ids = torch.zeros(batch, seq, dtype=torch.long)
        inputs = ((), {"input_ids": ids, "labels": ids})
        graph = capture(model_of(name), inputs, compute_dtype="bfloat16", device_kind="cuda")
        for device, devices, allowances in worlds:
            for memory in allowances:
                more = {} if memory is None else {"memory": memory}
                question = resolve(Request(device=device, devices=devices, **more))
                started = time.process_time()
                try:
                    answer = plan_graph(graph, question)
                except InfeasibleBudgetError as error:
                    what = f"infeasible, {format_bytes(error.missing_bytes)} missing"
                else:
                    found = answer.found
                    what = f"{format_ns(found.timeline.step_ns)}, {format_bytes(found.timeline.peak_bytes)}, "
                    what += f"{found.optimal.status}, gap {100 * found.optimal.gap:.3f} %, "
                    what += f"communication over compute {communication(answer):.2f}"
                seconds = time.process_time() - started
                print(f"{name}, {devices} x {device}, {memory or 'all'}: {seconds:.2f} s of CPU, {what}", flush=True)


if __name__ == "__main__":
    main()
