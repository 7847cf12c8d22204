"""What others say of the same step: torch's FSDPMemTracker, and a calculator of the common formulas."""

import gc
import time
from typing import Any

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from autoshard.analysis import analyze
from autoshard.capture import capture
from autoshard.capture.loss import find_loss
from autoshard.plan import Decisions
from autoshard.request import resolve
from autoshard.runtime import apply_plan, make_optimizer
from autoshard.runtime.sandbox import fake_mesh
from benchmarks.memory.configurations import CONFIGURATIONS, TRACKED, make_plan
from benchmarks.memory.models import BATCH, HEADS, HIDDEN, LAYERS, SEQ, Model


def peers(model: Model) -> dict[str, Any]:
    """The calculator's answer, and the tracker's in a process that has run no step, and after one."""
    (configuration,) = (one for one in CONFIGURATIONS if one.name == TRACKED)
    question = resolve(configuration.request)
    graph = capture(model.build(), model.inputs(), compute_dtype=question.compute_dtype)
    decisions = make_plan(graph, analyze(graph, num_shards=question.num_shards), question, configuration)
    assert decisions is not None
    found: dict[str, Any] = {"model": model.name, "state": "tracked", "calculator": calculate(model, decisions)}
    for name, num_warm in (("cold", 0), ("warmed", 1)):
        start = time.process_time()
        try:
            found[name] = track(model, decisions, question.optimizer, num_warm)
        except Exception as error:  # what it does not support, it raises in many ways
            found[name], found[f"{name}_error"] = 0, f"{type(error).__name__}: {error}"
        found[f"{name}_seconds"] = time.process_time() - start
    return found


def calculate(model: Model, decisions: Decisions) -> int:
    """Bytes by the rules that calculators use; 0 where they have none for the activations of such a model.

    16 bytes a parameter over the shards (weights, gradients and both moments of AdamW in float32), the largest unit
    gathered in bf16, and for each layer of a transformer ``s b h (34 + 5 a s / h)`` bytes of activations in bf16
    (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, formula 2).
    """
    if not model.is_transformer:
        return 0
    num_params = sum(unit.num_bytes for unit in decisions.units) // 4
    largest = max(unit.num_bytes for unit in decisions.units) // 4
    layer = SEQ * BATCH * HIDDEN * 34 + 5 * HEADS * SEQ * SEQ * BATCH
    return 16 * num_params // decisions.num_shards + 2 * largest + LAYERS * layer


def track(model: Model, decisions: Decisions, optimizer: str, num_warm: int) -> int:
    """Peak bytes of a step by torch's ``FSDPMemTracker``, after as many whole steps as are given."""
    args, kwargs = model.inputs()
    with fake_mesh(decisions) as mesh:
        torch.manual_seed(0)
        sharded = apply_plan(model.build().train(), decisions, mesh)
        steps = make_optimizer(optimizer, sharded.parameters(), lr=1e-4)

        def step() -> None:
            find_loss(sharded(*args, **kwargs), None)[0].backward()
            steps.step()
            steps.zero_grad()

        for _ in range(num_warm):
            step()
        gc.collect()
        tracker = FSDPMemTracker(sharded, steps)
        tracker.track_inputs((args, kwargs))
        with tracker:
            step()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
