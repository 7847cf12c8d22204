"""The models of the benchmark as configurations, written from what is published about them; nothing is downloaded."""

from typing import Any

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def llama(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    """A decoder of Llama's form."""
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return _LLAMA | sizes


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": llama(4096, 14336, 32, 32),
    "llama-3.1-70b": llama(8192, 28672, 80, 64),
    "llama-3.1-405b": llama(16384, 53248, 126, 128),
    "dense-1t": llama(20480, 65536, 200, 160),
    "mixtral-8x22b": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 6144,
        "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32768, "max_position_embeddings": 65536,
        "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "hidden_act": "silu", "max_position_embeddings": 4096,
        "vocab_size": 129280, "tie_word_embeddings": False,
    },
    "vit-22b": {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 6144,
        "intermediate_size": 24576, "num_hidden_layers": 48, "num_attention_heads": 48, "image_size": 224,
        "patch_size": 14,
    },
}  # fmt: skip

GROWTH = {f"{layers} layers": llama(16384, 53248, layers, 128) for layers in (32, 64, 128)}
"""One form of block, more and more of them."""

SIZES = {"deepseek-v3": ("h200", 2048), "vit-22b": ("h100-80gb", 256)}
"""Profile and number of devices where the usual ones do not do."""
USUAL = ("h100-80gb", 512)
