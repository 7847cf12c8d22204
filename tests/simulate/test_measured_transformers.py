"""Projected against measured for two real architectures: a decoder with its own head, and one with a tied head."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autoshard.capture import capture
from autoshard.request import Request, resolve
from autoshard.simulate import simulate
from tests.simulate.measured import decisions, measure

pytestmark = pytest.mark.slow

TOLERANCE = 0.001
"""Of the measured peak."""


def _llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=997,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def _gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=997, n_positions=32, n_embd=64, n_layer=3, n_head=4, use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0
    )
    return GPT2LMHeadModel(config).train()


def _checkpointed(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model, which recomputes its layers by itself."""

    def made() -> nn.Module:
        model = build()
        model.activation_checkpointing_enable()  # type: ignore[operator]
        return model

    return made


LLAMA_LAYERS = tuple((f"model.layers.{index}",) for index in range(3))
LAYER_NAMES = tuple(layer[0] for layer in LLAMA_LAYERS)
LLAMA = (("model.embed_tokens",), *LLAMA_LAYERS, (("model.norm", "lm_head"), False))
PARTS = (
    ("model.embed_tokens",),
    *((f"model.layers.{index}.{part}",) for index in range(3) for part in ("self_attn", "mlp")),
    *LLAMA_LAYERS,
    (("model.norm", "lm_head"), False),
)
GPT2_LAYERS = tuple((f"transformer.h.{index}",) for index in range(3))
BF16 = {"param": "bfloat16", "reduce": "float32"}

CASES = {
    "llama fp32": (_llama, decisions(*LLAMA)),
    "llama bf16": (_llama, decisions(*LLAMA, **BF16)),
    "llama bf16, 64 devices": (_llama, decisions(*LLAMA, shards=64, **BF16)),
    "llama layers and root": (_llama, decisions(*LLAMA_LAYERS, **BF16)),
    "llama root only": (_llama, decisions(**BF16)),
    "llama attention and mlp": (
        _llama,
        decisions(*PARTS),
    ),
    "llama that recomputes": (_checkpointed(_llama), decisions(*LLAMA, **BF16)),
    "llama that recomputes, root only": (_checkpointed(_llama), decisions(**BF16)),
    "llama that recomputes, units inside": (_checkpointed(_llama), decisions(*PARTS)),
    "gpt2 that recomputes": (_checkpointed(_gpt2), decisions(*GPT2_LAYERS, **BF16)),
    "llama, recompute": (_llama, decisions(*LLAMA, recompute=LAYER_NAMES)),
    "llama, recompute, bf16": (_llama, decisions(*LLAMA, recompute=LAYER_NAMES, **BF16)),
    "llama, recompute every other, root only": (_llama, decisions(recompute=LAYER_NAMES[::2], **BF16)),
    "llama, recompute the mlp": (_llama, decisions(*LLAMA, recompute=tuple(f"{name}.mlp" for name in LAYER_NAMES))),
    "gpt2, recompute": (_gpt2, decisions(*GPT2_LAYERS, recompute=tuple(layer[0] for layer in GPT2_LAYERS), **BF16)),
    "llama replicas": (_llama, decisions(*LLAMA, shards=4, replicas=2, **BF16)),
    "gpt2 layers and root": (_gpt2, decisions(*GPT2_LAYERS, **BF16)),
    "gpt2 tied list": (
        _gpt2,
        decisions(("transformer.wte", "lm_head"), ("transformer.wpe",), *GPT2_LAYERS),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [17, 31])
def test_transformers(name: str, tokens: int) -> None:
    build, plan = CASES[name]
    ids = torch.arange(17 * tokens).reshape(17, tokens) % 997 if tokens == 31 else torch.arange(17).reshape(1, 17)
    keywords = {"input_ids": ids, "labels": ids.clone()}

    def loss(output: Any) -> torch.Tensor:
        return output.loss

    dtype = "float32" if plan.precision.param == "same" else plan.precision.param
    measured = measure(build, plan, (), loss, "adamw", keywords)
    graph = capture(build(), ((), keywords), loss=loss, compute_dtype=dtype, device_kind="cpu")
    timeline = simulate(graph, plan, resolve(Request(device="cpu", devices=plan.num_devices)))

    issued = [(found.kind, found.num_bytes, found.dtype) for found in timeline.collectives()]
    assert issued == list(measured.collectives)
    pairs = {
        "steady": (timeline.steady_bytes, measured.steady),
        "forward peak": (timeline.phase_peak_bytes("forward"), measured.forward_peak),
        "after forward": (timeline.phase_end_bytes("forward"), measured.after_forward),
        "backward peak": (timeline.phase_peak_bytes("backward"), measured.backward_peak),
        "after backward": (timeline.phase_end_bytes("backward"), measured.after_backward),
        "optimizer peak": (timeline.phase_peak_bytes("optimizer"), measured.optimizer_peak),
    }
    allowed = TOLERANCE * max(measured.forward_peak, measured.backward_peak)
    wrong = {where: pair for where, pair in pairs.items() if abs(pair[0] - pair[1]) > allowed}
    assert not wrong, f"(projected, measured): {wrong}"
