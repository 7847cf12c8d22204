"""A convolutional autoencoder: a model that returns no loss, and a model file that says how to get one.

``loss`` takes whatever the model returns. The batch is free, the image size is not, so ``example_inputs`` takes a
batch only and ``--seq`` is refused::

    autoshard plan examples/autoencoder.py -o autoencoder.json --device cpu --devices 4 --batch 8
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (16, 32, 64, 128)


@dataclass
class Output:
    """What the model returns."""

    images: Tensor
    restored: Tensor


class Stage(nn.Module):
    """Two convolutions with a residual, then a change of width and resolution."""

    def __init__(self, width: int, out: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.change = nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Half or double the resolution."""
        x = x + self.second(F.silu(self.norm(self.first(x))))
        return self.change(F.interpolate(x, scale_factor=self.scale))


class Autoencoder(nn.Module):
    """Images to a small code and back."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, WIDTHS[0], 3, padding=1)
        self.down = nn.ModuleList(Stage(a, b, 0.5) for a, b in pairwise(WIDTHS))
        self.up = nn.ModuleList(Stage(b, a, 2.0) for a, b in reversed(list(pairwise(WIDTHS))))
        self.leave = nn.Conv2d(WIDTHS[0], 3, 3, padding=1)

    def forward(self, images: Tensor) -> Output:
        """The images beside what the code gives back."""
        x = self.enter(images)
        for stage in (*self.down, *self.up):
            x = stage(x)
        return Output(images=images, restored=self.leave(x))


def build_model() -> Autoencoder:
    """The model."""
    return Autoencoder()


def example_inputs(batch: int | None = None) -> tuple[tuple[Tensor], dict]:
    """Inputs of one training step on one device."""
    return (torch.rand(batch or 4, 3, 64, 64, generator=torch.Generator().manual_seed(0)),), {}


def loss(outputs: Output) -> Tensor:
    """From what the model returns to a scalar."""
    return F.mse_loss(outputs.restored, outputs.images)
