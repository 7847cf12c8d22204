"""GPT-2 (124 million parameters) as transformers builds it: embedding and head tied, no weights."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

REQUEST = {"device": "a100-80gb", "devices": 8}


def build_model():
    """The default configuration is the published one."""
    return GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa", use_cache=False))


def example_inputs(batch=None, seq=None):
    """Token ids that are their own labels."""
    ids = torch.zeros(batch or 8, seq or 1024, dtype=torch.long)
    return (), {"input_ids": ids, "labels": ids}
