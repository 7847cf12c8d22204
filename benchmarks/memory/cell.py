"""One model in all configurations: measured on real tensors, and projected."""

import gc
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autoshard.analysis import analyze
from autoshard.capture import capture
from autoshard.capture.loss import find_loss
from autoshard.ir import ModelGraph
from autoshard.plan import Decisions
from autoshard.request import Question, resolve
from autoshard.runtime import accumulate, apply_plan, clip_grad_norm_, make_optimizer
from autoshard.runtime.kind_bytes import KindBytes
from autoshard.runtime.sandbox import fake_mesh
from autoshard.simulate import KINDS, Timeline, simulate
from benchmarks.memory.configurations import CONFIGURATIONS, Configuration, make_plan
from benchmarks.memory.models import Inputs, Model

PHASES = ("forward", "backward", "optimizer")


def cells(model: Model, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """One line of JSON for each configuration of a model."""
    graphs: dict[str, ModelGraph] = {}
    wanted = frozenset(names)
    for configuration in CONFIGURATIONS:
        request = configuration.request
        if configuration.name not in wanted or (request.precision == "bf16" and not model.takes_bf16):
            continue
        question = resolve(request)
        dtype = question.compute_dtype
        if dtype not in graphs:
            graphs[dtype] = capture(model.build(), model.inputs(), compute_dtype=dtype)
        graph = graphs[dtype]
        decisions = make_plan(graph, analyze(graph, num_shards=question.num_shards), question, configuration)
        line: dict[str, Any] = {"model": model.name, "kind": model.kind, "configuration": configuration.name}
        if decisions is None:
            yield {**line, "state": "not there"}
            continue
        timeline, seconds = project(graph, decisions, question, configuration)
        measured, kinds = measure(model, decisions, question, configuration)
        highest = max(timeline.summits, key=lambda summit: summit.high)
        by_kind = {kind: size for kind, size in zip(KINDS, highest.high_live, strict=True) if size}
        yield {
            **line,
            "state": "measured",
            "num_units": len(decisions.units),
            "num_recompute": len(decisions.recompute),
            "projected": {phase: timeline.phase_peak_bytes(phase) for phase in PHASES},
            "measured": measured,
            "kinds_projected": by_kind,
            "kinds_measured": kinds[highest.phase],
            "project_seconds": seconds,
        }


def project(
    graph: ModelGraph, decisions: Decisions, question: Question, configuration: Configuration
) -> tuple[Timeline, float]:
    """The projection, and the CPU seconds that a further one takes."""
    timeline = simulate(graph, decisions, question, is_first=configuration.is_first)
    start = time.process_time()
    simulate(graph, decisions, question, is_first=configuration.is_first)
    return timeline, time.process_time() - start


def measure(
    model: Model, decisions: Decisions, question: Question, configuration: Configuration
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Peak bytes by phase of the second of two steps, or of the first, and what each peak was made of."""
    with fake_mesh(decisions) as mesh:
        if configuration.is_first:
            _train_another(model, decisions, mesh, question)
        sharded, optimizer = _sharded(model, decisions, mesh, question)
        inputs = model.inputs()
        if not configuration.is_first:
            for _ in _step(inputs, sharded, optimizer, decisions, question):
                pass
        gc.collect()
        counter = KindBytes("cpu")
        _follow(counter, sharded, optimizer, inputs)
        peaks: dict[str, int] = {}
        kinds: dict[str, dict[str, int]] = {}
        with counter, counter.watching():
            counter.restart_peak()
            for phase in _step(inputs, sharded, optimizer, decisions, question, counter):
                if counter.peak > peaks.get(phase, -1):
                    peaks[phase], kinds[phase] = counter.peak, counter.by_kind()
                counter.restart_peak()
        return peaks, kinds


def _sharded(
    model: Model, decisions: Decisions, mesh: Any, question: Question
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    sharded = apply_plan(model.build().train(), decisions, mesh)
    return sharded, make_optimizer(question.optimizer, sharded.parameters(), lr=1e-4)


def _train_another(model: Model, decisions: Decisions, mesh: Any, question: Question) -> None:
    """A whole step, so that what torch makes once in a process is there."""
    sharded, optimizer = _sharded(model, decisions, mesh, question)
    for _ in _step(model.inputs(), sharded, optimizer, decisions, question):
        pass


def _step(
    inputs: Inputs,
    sharded: nn.Module,
    optimizer: torch.optim.Optimizer,
    decisions: Decisions,
    question: Question,
    counter: KindBytes | None = None,
) -> Iterator[str]:
    """One step; after each part the name of its phase."""
    args, kwargs = inputs
    for _ in accumulate(sharded, decisions, range(decisions.micro_batches)):
        loss = find_loss(sharded(*args, **kwargs), None)[0]
        yield "forward"
        loss.backward()
        yield "backward"
        del loss
    if counter is None:
        _update(sharded, optimizer, question)
    else:
        with counter.made("temporaries"):
            _update(sharded, optimizer, question)
            counter.are(
                "optimizer_state",
                (leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)),
            )
    yield "optimizer"


def _update(sharded: nn.Module, optimizer: torch.optim.Optimizer, question: Question) -> None:
    if question.clip:
        clip_grad_norm_(sharded, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=question.zero_grad == "none")


def _follow(counter: KindBytes, sharded: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
    state = (leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor))
    for kind, tensors in (
        ("sharded_params", sharded.parameters()),
        ("sharded_grads", (param.grad for param in sharded.parameters())),
        ("optimizer_state", state),
        ("buffers", sharded.buffers()),
        ("inputs", tree_leaves(inputs)),
    ):
        with counter.made(kind):
            counter.follow(tensors)
