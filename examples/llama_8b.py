"""Llama-3.1-8B's dimensions in plain torch: a model that is planned here and trained elsewhere.

Nothing of its size is allocated for planning; the model is built on the meta device::

    autoshard plan examples/llama_8b.py -o llama.json --device h100-80gb --devices 8

Dimensions from the model's published configuration (vocabulary 128256, hidden 4096, 32 layers, 32 heads of which 8 for
keys and values, intermediate 14336). The scaling of rotary frequencies for long contexts is left out: it changes
values, not shapes.
"""

from tiny_llama import Config, Llama, random_tokens
from torch import Tensor

CONFIG = Config(
    vocabulary=128256,
    hidden=4096,
    intermediate=14336,
    layers=32,
    heads=32,
    key_value_heads=8,
    rope_theta=500_000.0,
    norm_eps=1e-5,
)


def build_model() -> Llama:
    """The model, 8.03 billion parameters."""
    return Llama(CONFIG)


def example_inputs(batch: int | None = None, seq: int | None = None, seed: int = 0) -> tuple[tuple, dict[str, Tensor]]:
    """Inputs of one training step on one device."""
    return random_tokens(CONFIG.vocabulary, batch or 1, seq or 4096, seed)
