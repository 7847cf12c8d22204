"""What compiled blocks keep for backward, beside what is projected for them: ``make bench-compile``.

Each model runs one forward on the CPU in float32, as written and with ``torch.compile`` (inductor) on its repeated
blocks. Bytes are those that the CPU allocator has handed out and not got back at the end of the forward, by its own
events (torch.profiler), so that kernels fused by the compiler are seen as well. As written they are what is projected;
the last column is the ratio that ``autoshard/simulate/compiled.py`` keeps.
"""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from autoshard.analysis import analyze
from autoshard.capture import capture
from autoshard.planner import compiled_blocks
from autoshard.report import Table, format_table

BATCH, SEQ, WIDTH, HEADS, LAYERS, VOCAB = 2, 128, 128, 4, 2, 512


class Decoder(nn.Module):
    """A block as in Llama: RMS norm, grouped attention, gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.post = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual attention, residual feed-forward."""
        q, kv = self.qkv(self.norm(x)).split(WIDTH, -1)
        k, v = kv.chunk(2, -1)
        q = q.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (part.unflatten(-1, (HEADS // 2, -1)).transpose(1, 2) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = self.post(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Gpt(nn.Module):
    """A block as in GPT-2: layer norm, GELU of three terms, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual attention, residual feed-forward."""
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.1)
        hidden = self.up(self.post(x))
        hidden = 0.5 * hidden * (1 + torch.tanh(0.7979 * (hidden + 0.044715 * hidden.pow(3))))
        return x + F.dropout(self.down(hidden), 0.1)


class Mixer(nn.Module):
    """A block as in ConvNeXt: depthwise convolution, layer norm, GELU, a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.full((WIDTH,), 0.1))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix along the sequence, then along the channels."""
        hidden = self.norm(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return x + self.scale * self.down(F.gelu(self.up(hidden)))


class Experts(nn.Module):
    """A block with four experts that all run, weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every expert on every token, by weight."""
        hidden = self.norm(x)
        weight = self.router(hidden).softmax(-1)
        done = torch.einsum("bsd,edh->besh", hidden, self.up).relu().square()
        return x + torch.einsum("besh,ehd,bse->bsd", done, self.down, weight)


class Mlp(nn.Module):
    """A block of nothing but a feed-forward with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual feed-forward."""
        hidden = self.up(x)
        return x + self.down(F.leaky_relu(self.norm(hidden.transpose(1, 2)).transpose(1, 2)))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "decoder (RMS norm, grouped attention, SwiGLU)": Decoder,
    "GPT-2 (layer norm, GELU by hand, dropout)": Gpt,
    "ConvNeXt (depthwise convolution, GELU)": Mixer,
    "experts (softmax router, squared ReLU)": Experts,
    "batch norm feed-forward": Mlp,
}


class Model(nn.Module):
    """Embedding, equal blocks, head."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean of the logits' squares."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def held_bytes(model: nn.Module, ids: torch.Tensor) -> int:
    """Bytes that a forward leaves allocated, after two steps that warm everything up."""
    for _ in range(2):
        model(ids).backward()
    with torch.profiler.profile(profile_memory=True) as profile:
        loss = model(ids)
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = sum(event.nbytes() for event in events if event.name() == "[memory]")
    loss.backward()
    return int(held)


def main() -> None:
    """Measure and print."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (BATCH, SEQ))
    rows = []
    for name, block in BLOCKS.items():
        model = Model(block)
        graph = capture(model, ((ids,), {}))
        written = held_bytes(model, ids)
        for fqn in compiled_blocks(graph, analyze(graph, num_shards=2)):
            model.get_submodule(fqn).compile()
        compiled = held_bytes(model, ids)
        rows.append((name, str(written), str(compiled), f"{compiled / written:.3f}"))
        print(f"    {name!r}: ({written}, {compiled}),", flush=True)
    headers = ("model", "as written", "compiled", "ratio")
    print(
        format_table(
            Table(title="bytes held at the end of forward", headers=headers, rows=tuple(rows), numeric=headers[1:])
        )
    )


if __name__ == "__main__":
    main()
