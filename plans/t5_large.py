"""T5-large as transformers builds it: encoder and decoder share one table with the head, no weights."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

REQUEST = {"device": "h100-80gb", "devices": 8}


def build_model():
    """The published configuration."""
    config = T5Config(
        vocab_size=32128,
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=24,
        num_decoder_layers=24,
        num_heads=16,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def example_inputs(batch=None, seq=None):
    """Source ids, and target ids of the same length."""
    ids = torch.zeros(batch or 4, seq or 512, dtype=torch.long)
    return (), {"input_ids": ids, "labels": ids}
