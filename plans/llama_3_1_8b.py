"""Llama-3.1-8B as transformers builds it: the published configuration, no weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

REQUEST = {"device": "h100-80gb", "devices": 8}


def build_model():
    """The model with its head, dense attention replaced by the fused kernel, the cache off as in training."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def example_inputs(batch=None, seq=None):
    """Token ids that are their own labels."""
    ids = torch.zeros(batch or 1, seq or 4096, dtype=torch.long)
    return (), {"input_ids": ids, "labels": ids}
