"""DeepSeek-V3 with each routed expert a module of its own: 58 layers of 256, as checkpoints with own code have it.

The configuration is the published one; the number of layers and experts can be cut by the environment variables
``NUM_LAYERS`` and ``NUM_EXPERTS``.
"""

import os
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

NUM_LAYERS = int(os.environ.get("NUM_LAYERS", "61"))
NUM_EXPERTS = int(os.environ.get("NUM_EXPERTS", "256"))


class ExpertModules(nn.ModuleList):
    """Routed experts, each on the tokens that chose it."""

    def __init__(self, config: DeepseekV3Config) -> None:
        sizes = range(config.n_routed_experts)
        super().__init__(DeepseekV3MLP(config, intermediate_size=config.moe_intermediate_size) for _ in sizes)

    def forward(self, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the chosen experts' results."""
        out = torch.zeros_like(states)
        mask = nn.functional.one_hot(chosen, num_classes=len(self)).permute(2, 1, 0)
        for number, expert in enumerate(self):
            place, token = torch.where(mask[number])
            result = expert(states[token]) * weights[token, place, None]
            out.index_add_(0, token, result.to(out.dtype))
        return out


def build_model() -> nn.Module:
    """The whole model, its fused experts exchanged."""
    config = DeepseekV3Config(
        num_hidden_layers=NUM_LAYERS, n_routed_experts=NUM_EXPERTS, use_cache=False, attn_implementation="sdpa"
    )
    model = DeepseekV3ForCausalLM(config)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = ExpertModules(config)
    return model


def example_inputs(batch: int | None = None, seq: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Token ids and labels."""
    ids = torch.zeros(batch or 1, seq or 2048, dtype=torch.long)
    return (), {"input_ids": ids, "labels": ids}
