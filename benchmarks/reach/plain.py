"""Models of plain torch that no library has to bring: a diffusion UNet and transformer, an LSTM, attention stacks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def timestep_embedding(steps: Tensor, width: int) -> Tensor:
    """Sines and cosines of a diffusion step.

    Args:
        steps: shape ``[batch]``.
        width: of the embedding, even.
    """
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=steps.device) / (width // 2))
    angles = steps[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ResidualBlock(nn.Module):
    """Two convolutions around a shift by the time embedding."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.shift = nn.Linear(time, out)
        self.second = nn.Sequential(nn.GroupNorm(8, out), nn.SiLU(inplace=True), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """A feature map of ``out`` channels."""
        hidden = self.first(x) + self.shift(time)[:, :, None, None]
        return self.second(hidden) + self.skip(x)


class ImageAttention(nn.Module):
    """Attention over the pixels, and over a text."""

    def __init__(self, channels: int, text: int, heads: int = 8) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.own = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(channels, heads, kdim=text, vdim=text, batch_first=True)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """A feature map of the same shape."""
        flat = self.norm(x).flatten(2).transpose(1, 2)
        flat = flat + self.own(flat, flat, flat, need_weights=False)[0]
        flat = flat + self.cross(flat, text, text, need_weights=False)[0]
        return x + flat.transpose(1, 2).reshape_as(x)


class UNet(nn.Module):
    """A conditioned diffusion UNet: three resolutions with skips between them."""

    def __init__(self, channels: int = 128, text: int = 512, levels: tuple[int, ...] = (1, 2, 4)) -> None:
        super().__init__()
        time = 4 * channels
        self.channels = channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(4, channels, 3, padding=1)
        widths = [channels * level for level in levels]
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        before = channels
        for width in widths:
            block, attention = ResidualBlock(before, width, time), ImageAttention(width, text)
            self.down.append(nn.ModuleList([block, attention, nn.Conv2d(width, width, 3, stride=2, padding=1)]))
            before = width
        self.middle = ResidualBlock(before, before, time)
        for width, after in zip(reversed(widths), [*reversed(widths[:-1]), channels], strict=True):
            block, attention = ResidualBlock(before + width, after, time), ImageAttention(after, text)
            self.up.append(nn.ModuleList([block, attention]))
            before = after
        self.leave = nn.Sequential(nn.GroupNorm(8, before), nn.SiLU(), nn.Conv2d(before, 4, 3, padding=1))

    def forward(self, latents: Tensor, steps: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        """The mean square of what is left of the noise."""
        time = self.time(timestep_embedding(steps, self.channels).to(latents.dtype))
        x, kept = self.enter(latents), []
        for block, attention, smaller in self.down:  # type: ignore[misc]
            x = attention(block(x, time), text)
            kept.append(x)
            x = smaller(x)
        x = self.middle(x, time)
        for block, attention in self.up:  # type: ignore[misc]
            skipped = kept.pop()
            x = torch.cat([F.interpolate(x, size=skipped.shape[-2:]), skipped], dim=1)
            x = attention(block(x, time), text)
        return F.mse_loss(self.leave(x), noise)


class DiTBlock(nn.Module):
    """Attention and an MLP whose norms are scaled and shifted by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Tokens of the same shape."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(condition)[:, None].chunk(6, dim=-1)
        query, key, value = self.qkv(self.norms[0](x) * (1 + scale) + shift).chunk(3, dim=-1)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value))
        x = x + gate * self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + gate_mlp * self.mlp(self.norms[1](x) * (1 + scale_mlp) + shift_mlp)


class DiT(nn.Module):
    """A diffusion transformer over patches of a latent image, conditioned on the step and a class."""

    def __init__(self, width: int = 1152, depth: int = 28, heads: int = 16, size: int = 32, patch: int = 2) -> None:
        super().__init__()
        self.width = width
        self.enter = nn.Conv2d(4, width, patch, stride=patch)
        self.position = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.kind = nn.Embedding(1001, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.leave = nn.Linear(width, 4 * patch * patch)
        self.fold = nn.PixelShuffle(patch)

    def forward(self, latents: Tensor, steps: Tensor, kinds: Tensor, noise: Tensor) -> Tensor:
        """The mean square of what is left of the noise."""
        patches = self.enter(latents)
        x = patches.flatten(2).transpose(1, 2) + self.position
        condition = self.time(timestep_embedding(steps, 256).to(x.dtype)) + self.kind(kinds)
        for block in self.blocks:
            x = block(x, condition)
        image = self.leave(x).transpose(1, 2).unflatten(2, patches.shape[-2:])
        return F.mse_loss(self.fold(image), noise)


class LSTMModel(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self, vocab: int = 32_000, width: int = 1024, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        logits = self.head(self.lstm(self.embed(ids))[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class AttentionStack(nn.Module):
    """Blocks of ``nn.MultiheadAttention``, whose out_proj it reads itself, between norms."""

    def __init__(self, width: int = 1024, depth: int = 12, heads: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of the same shape."""
        for norm, attention in zip(self.norms, self.attention, strict=True):
            normed = norm(x)
            x = x + attention(normed, normed, normed, need_weights=False)[0]
        return x


class Translation(nn.Module):
    """``nn.Transformer`` between two embeddings and a head."""

    def __init__(self, vocab: int = 32_000, width: int = 1024) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.transformer = nn.Transformer(width, 16, 6, 6, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        hidden = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target.flatten())
