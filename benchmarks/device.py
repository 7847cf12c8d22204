"""What this project could not compare without a GPU, compared on one: ``make bench-device``.

One GPU, under ten minutes. In this order: the attention rule (which kernel runs, and the bytes that it saves for
backward, by dtype, mask and head size), whole steps of a sharded decoder on a fake process group of eight (storages and
the allocator's figures beside the projection), the optimizers' steps, the allocator's rounding, and the scratch memory
of kernels. Each line holds what is projected and what the device did; all lines are written to
``benchmarks/device/<device>.json``, to be committed. Without CUDA it says so, ends with 3, and does nothing.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoshard import Request, apply_plan, make_optimizer, make_plan
from autoshard.capture import capture, find_accelerator
from autoshard.runtime.allocator import allocator_figures, restart_allocator
from autoshard.runtime.measure import measure
from autoshard.runtime.sandbox import fake_mesh

NO_DEVICE = 3
BATCH, HEADS, SEQ = 2, 8, 512
FOLDER = Path(__file__).parent / "device"
KERNELS = ("flash", "efficient", "cudnn", "math")


class Attention(nn.Module):
    """One call of scaled dot product attention between two products, so that there is something to train."""

    def __init__(self, dim: int, is_causal: bool, has_mask: bool, dropout: float) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.options = {"is_causal": is_causal, "dropout_p": dropout}
        self.has_mask = has_mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention of heads of ``dim`` on themselves."""
        q = self.enter(x)
        mask = torch.zeros(x.shape[-2], x.shape[-2], dtype=x.dtype, device=x.device) if self.has_mask else None
        return (
            self.leave(F.scaled_dot_product_attention(q, q, q, attn_mask=mask, **self.options)).float().square().mean()
        )


def attention_lines() -> Iterator[dict[str, Any]]:
    """Kernel and bytes held at the end of forward, projected and measured."""
    cases = product(("float16", "bfloat16", "float32"), (32, 64, 80, 128, 256), ("none", "causal", "mask"), (0.0, 0.1))
    for dtype, dim, mask, dropout in cases:
        model = Attention(dim, mask == "causal", mask == "mask", dropout)
        x = torch.zeros(BATCH, HEADS, SEQ, dim)
        compute = "float32" if dtype == "float32" else dtype
        graph = capture(model, ((x,), {}), compute_dtype=compute, device_kind="cuda")
        targets = [
            op.target for op in graph.root.forward if "scaled_dot_product" in op.target or "_attention" in op.target
        ]
        held = sum(
            storage.nbytes
            for storage in graph.root.storages
            if storage.born.phase == "forward" and storage.kind == "activation"
        )
        model, x = model.to("cuda", getattr(torch, dtype)), x.to("cuda", getattr(torch, dtype))
        model(x).backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        with torch.profiler.profile() as profile:
            loss = model(x)
        measured = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        names = {event.name for event in profile.events() if "scaled_dot_product" in event.name}
        del loss
        yield {
            "what": "attention", "dtype": dtype, "head_dim": dim, "mask": mask, "dropout": dropout,
            "projected_kernel": _kernel(targets), "measured_kernel": _kernel(names),
            "projected_bytes": held, "measured_bytes": measured,
        }  # fmt: skip


def _kernel(names: Any) -> str:
    return next((kernel for kernel in KERNELS if any(kernel in name for name in names)), "math")


class Block(nn.Module):
    """Causal attention and a feed-forward, each added to what comes in."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.norm_after = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.enter, self.leave = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch, sequence, width in and out."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.enter(self.norm(x)).chunk(3, -1)
        )
        x = x + self.leave(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_after(x))))


class Decoder(nn.Module):
    """Embedding, blocks, head and loss."""

    def __init__(self, vocabulary: int, dim: int, num_blocks: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, dim), nn.Linear(dim, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(dim, dim // 64) for _ in range(num_blocks))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of naming the ids."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


STEPS = (("fp32", "adamw-for-loop"), ("bf16", "adamw-foreach"), ("bf16", "adamw-fused"), ("bf16", "sgd-momentum"))
"""Precision and optimizer of each step that is compared."""


def step_lines(
    device: str = "cuda", sizes: tuple[int, int, int, int] = (32003, 1024, 8, 1024), steps: Any = STEPS
) -> Iterator[dict[str, Any]]:
    """A later step of a decoder sharded over eight devices, of which this process is one: bytes by phase.

    Args:
        device: torch's type of the device.
        sizes: vocabulary, width, blocks, sequence.
        steps: precision and optimizer of each.
    """
    vocabulary, dim, num_blocks, seq = sizes
    profile = find_accelerator() if device == "cuda" else None
    for precision, optimizer in steps:
        model, ids = Decoder(vocabulary, dim, num_blocks), torch.zeros(BATCH, seq, dtype=torch.long)
        request = Request(
            device=profile[0] if profile else "cpu",
            devices=8,
            precision=precision,
            optimizer=optimizer,
            recompute="none",
        )
        plan = make_plan(model, ((ids,), {}), request=request)
        with fake_mesh(plan, device_type=device) as mesh:
            sharded = apply_plan(model.to(device), plan, mesh)
            run = partial(sharded, ids.to(device))
            found = measure(sharded, make_optimizer(optimizer, sharded.parameters(), lr=1e-4), run, 1)
        projected = {peak.phase: peak.peak_bytes for peak in plan.projection.phases}
        # The meter is not told of the ids: they were there before and stay.
        measured = {phase: size + ids.nbytes for phase, size in found.peak_by_phase.items()}
        yield {
            "what": "step", "precision": precision, "optimizer": optimizer, "num_units": len(plan.units),
            "projected_bytes": projected, "measured_bytes": measured, "allocator": found.allocator,
            "named": [text for text in plan.projection.not_modelled if "not compared" in text],
        }  # fmt: skip


def optimizer_lines() -> Iterator[dict[str, Any]]:
    """Bytes that a step allocates beside its state, by form."""
    forms: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "adamw foreach": lambda params: torch.optim.AdamW(params, foreach=True),
        "adamw fused": lambda params: torch.optim.AdamW(params, fused=True),
        "adamw loop": lambda params: torch.optim.AdamW(params, foreach=False),
        "sgd momentum foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    }
    for name, make in forms.items():
        params = [nn.Parameter(torch.zeros(1 << 20, device="cuda")) for _ in range(8)]
        optimizer = make(params)
        for _ in range(2):
            for param in params:
                param.grad = torch.zeros_like(param)
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            restart_allocator("cuda")
            optimizer.step()
        whole = sum(param.nbytes for param in params)
        yield {
            "what": "optimizer", "form": name, "parameter_bytes": whole,
            "temporary_bytes": allocator_figures("cuda")["requested_peak"] - before,
        }  # fmt: skip


def allocator_lines() -> Iterator[dict[str, Any]]:
    """What the allocator makes of a request."""
    for size in (1, 511, 513, (1 << 20) - 1, (1 << 20) + 1, (10 << 20) + 1, (100 << 20) + 1):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()
        held = torch.empty(size, dtype=torch.uint8, device="cuda")
        after = torch.cuda.memory_stats()
        yield {
            "what": "allocator", "requested": held.nbytes,
            "allocated": after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"],
            "reserved": after["reserved_bytes.all.current"] - before["reserved_bytes.all.current"],
        }  # fmt: skip


def scratch_lines() -> Iterator[dict[str, Any]]:
    """Peak of an op beyond its inputs and its result."""
    a = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)
    image, kernel = torch.zeros(8, 64, 56, 56, device="cuda"), torch.zeros(64, 64, 3, 3, device="cuda")
    ops: dict[str, Callable[[], torch.Tensor]] = {
        "matrix product": lambda: a @ a,
        "convolution": lambda: F.conv2d(image, kernel, padding=1),
    }
    for name, op in ops.items():
        op()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        restart_allocator("cuda")
        result = op()
        torch.cuda.synchronize()
        peak = allocator_figures("cuda")["requested_peak"] - before
        yield {"what": "scratch", "op": name, "bytes": peak - result.nbytes}


def main() -> int:
    """Compare and write; the exit code."""
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was compared with a device", file=sys.stderr)
        return NO_DEVICE
    began = time.monotonic()
    lines: list[dict[str, Any]] = []
    for part in (attention_lines, step_lines, optimizer_lines, allocator_lines, scratch_lines):
        for line in part():
            lines.append(line)
            print(json.dumps(line), flush=True)
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    FOLDER.mkdir(exist_ok=True)
    text = ",\n".join(f"  {json.dumps(line)}" for line in lines)
    (FOLDER / f"{name}.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")
    right = sum(line["projected_kernel"] == line["measured_kernel"] for line in lines if line["what"] == "attention")
    print(f"{right} attention kernels as projected; {len(lines)} lines in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
