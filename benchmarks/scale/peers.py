"""What else reads a whole model before training, with a fake process group."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.scale.cases import CONFIGS
from benchmarks.scale.plain import build_model


def _start() -> None:
    torch.distributed.init_process_group(
        "fake", rank=0, world_size=8, store=torch.testing._internal.distributed.fake_pg.FakeStore()
    )


def _model() -> nn.Module:
    config = dict(CONFIGS["llama-3.1-8b"])
    made = AutoConfig.for_model(config.pop("model_type"), **config, use_cache=False)
    return AutoModelForCausalLM.from_config(made)


def _shard(model: nn.Module) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def shard() -> None:
    """Apply ``fully_shard`` to each block and the root, on meta: what accelerate and torchtitan do to prepare."""
    import torch.testing._internal.distributed.fake_pg

    _start()
    with torch.device("meta"):
        model = _model()
    _shard(model)


def track() -> None:
    """One step of the plain decoder on fake tensors under torch's own tracker of FSDP2's memory."""
    import torch.testing._internal.distributed.fake_pg
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    _start()
    mesh = torch.distributed.init_device_mesh("cpu", (8,))  # it reads its own ranks, which fake tensors do not have
    with FakeTensorMode():
        model = build_model()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        tracker = FSDPMemTracker(model, optimizer)
        ids = torch.zeros(1, 2048, dtype=torch.long)
        tracker.track_inputs((ids,))
        with tracker:
            model(ids).mean().backward()
            optimizer.step()
