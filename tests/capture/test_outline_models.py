"""Models as people use them, traced by blocks and in full: the same graph, and the same bytes of the plan."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import capture
from autoshard.pipeline import run_pipeline
from autoshard.plan import encode_plan
from autoshard.request import Request

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

DEPTH = 6
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "vocab_size": 50,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
TEXT = {"input_ids": torch.full((1, 16), 5), "labels": torch.full((1, 16), 5)}
PIXELS = torch.zeros(2, 3, 16, 16)
SHAPES = {"image_size": 16, "patch_size": 8}


class OldExperts(nn.Module):
    """A decoder whose experts are modules, as in models from before fused experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(OldLayer() for _ in range(DEPTH))
        self.head = nn.Linear(32, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class OldLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.router = nn.Linear(32, 8, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 16), nn.SiLU(), nn.Linear(16, 32)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        hits = nn.functional.one_hot(chosen, 8).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            slot, row = torch.where(hits[number])
            out.index_add_(0, row, expert(flat[row]) * weights[row, slot, None])
        return x + out.view_as(x)


def _made(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    kind = getattr(transformers, name)
    return lambda: kind(kind.config_class(**sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "llama": (_made("LlamaForCausalLM", **SMALL, **GROUPED), TEXT, 6),
    "mixtral": (_made("MixtralForCausalLM", **SMALL, **GROUPED, num_local_experts=4), TEXT, 6),
    "gemma2": (_made("Gemma2ForCausalLM", **{**SMALL, "num_hidden_layers": 10}, **GROUPED, sliding_window=8), TEXT, 10),
    "qwen3-tied": (_made("Qwen3ForCausalLM", **SMALL, **GROUPED, tie_word_embeddings=True), TEXT, 6),
    "deepseek": (
        _made("DeepseekV3ForCausalLM", **{**SMALL, "num_hidden_layers": 7}, num_key_value_heads=4, kv_lora_rank=8,
              q_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8, n_group=2, topk_group=1,
              n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1), TEXT, 6,
    ),
    "gpt2": (_made("GPT2LMHeadModel", n_embd=32, n_layer=DEPTH, n_head=4, vocab_size=50, use_cache=False), TEXT, 6),
    "bert": (_made("BertForMaskedLM", **SMALL), TEXT, 6),
    "t5": (
        _made("T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=DEPTH, num_heads=4, vocab_size=50,
              use_cache=False, decoder_start_token_id=0, pad_token_id=0), TEXT, 10,
    ),
    "whisper": (
        _made("WhisperForConditionalGeneration", d_model=32, encoder_layers=DEPTH, decoder_layers=DEPTH,
              encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
              vocab_size=50, num_mel_bins=8, max_source_positions=20, use_cache=False, pad_token_id=0, bos_token_id=1,
              eos_token_id=2, decoder_start_token_id=1),
        {"input_features": torch.zeros(1, 8, 40), "labels": torch.full((1, 9), 5)}, 12,
    ),
    "vit": (_made("ViTForImageClassification", **VISION, **SHAPES), {"pixel_values": PIXELS}, 6),
    "clip": (
        _made("CLIPModel", projection_dim=16, vision_config={**VISION, **SHAPES},
              text_config={**VISION, "vocab_size": 50, "eos_token_id": 2}),
        {"input_ids": torch.full((2, 8), 5), "pixel_values": PIXELS, "return_loss": True}, 12,
    ),
    "albert": (_made("AlbertForMaskedLM", **{n: v for n, v in SMALL.items() if n != "use_cache"}), TEXT, 0),
    "old-experts": (OldExperts, TEXT, DEPTH + 3 * 8),
    "cached": (_made("LlamaForCausalLM", **{**SMALL, "use_cache": True}, **GROUPED), TEXT, 0),
}  # fmt: skip
"""Model, inputs, and how many blocks are replayed."""


@pytest.mark.parametrize("name", MODELS)
def test_outlined_and_full_are_the_same(name: str) -> None:
    make, inputs, num_replayed = MODELS[name]
    with torch.device("meta"):
        model = make()
    options: dict[str, Any] = {"compute_dtype": "bfloat16", "device_kind": "cuda"}
    full = capture(model, ((), inputs), outline=False, **options)
    outlined = capture(model, ((), inputs), **options)
    assert full == outlined
    assert sum(outline.num_replayed for outline in outlined.outlines) == num_replayed


@pytest.mark.parametrize("name", ["mixtral", "t5", "old-experts"])
def test_the_plans_are_the_same_bytes(name: str) -> None:
    make, inputs, _ = MODELS[name]
    with torch.device("meta"):
        model = make()
    request = Request(device="h100-80gb", devices=4, memory="2MiB")
    plans = [
        encode_plan(
            run_pipeline(model, ((), inputs), loss=None, entry="forward", request=request, outline=outline).plan
        )
        for outline in (False, True)
    ]
    assert plans[0] == plans[1]
