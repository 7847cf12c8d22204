"""Models of other kinds and libraries: plain torch, LoRA by peft, diffusers, timm and torchvision.

A library that is not installed is named in the summary with its models; it is never counted as reached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.reach import plain
from benchmarks.reach.one import Stage, planned

Pair = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Other:
    """A model beside transformers' architectures.

    Attributes:
        libraries: what has to be installed.
        build: makes the model.
        inputs: ``(args, kwargs)`` of one training step of a model.
    """

    libraries: tuple[str, ...]
    build: Callable[[], nn.Module]
    inputs: Callable[[Any], Pair]

    @property
    def missing(self) -> tuple[str, ...]:
        """Libraries that are not installed."""
        return tuple(name for name in self.libraries if find_spec(name) is None)


def attempt_other(name: str, *, verify: str) -> Callable[[Stage], dict[str, Any]]:
    """The attempt at one of these models."""

    def attempt(stage: Stage) -> dict[str, Any]:
        from autoshard.capture.build import on_meta

        other = OTHERS[name]
        model = on_meta(other.build)
        return planned(model, other.inputs(model), stage, verify=verify)

    return attempt


def _ids(batch: int = 1, seq: int = 128) -> torch.Tensor:
    return torch.zeros(batch, seq, dtype=torch.long)


def _image(model: Any, size: int = 224) -> Pair:
    return (torch.zeros(2, 3, size, size),), {}


def _lora(kind: str, cls: str, targets: list[str], **sizes: Any) -> nn.Module:
    """An architecture with adapters; everything else is frozen."""
    import peft
    import transformers

    config = transformers.CONFIG_MAPPING[kind](**sizes)
    config.use_cache = False
    model = getattr(transformers, cls)(config)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=targets), autocast_adapter_dtype=False)
    return adapted.train()


def _made(model: Any) -> Pair:
    from autoshard.integrations.transformers import make_inputs

    return make_inputs(model, "lora", seq=128).pair


def _of(module: str, cls: str, **config: Any) -> nn.Module:
    from importlib import import_module

    return getattr(import_module(module), cls)(**config)


def _timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name)


def _torchvision(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None)


def _unet_inputs(model: Any) -> Pair:
    noise = torch.zeros(1, 4, 32, 32)
    return (noise, torch.zeros(1, dtype=torch.long), torch.zeros(1, 77, 512), noise), {}


def _dit_inputs(model: Any) -> Pair:
    noise, kinds = torch.zeros(1, 4, 32, 32), torch.zeros(1, dtype=torch.long)
    return (noise, kinds, kinds, noise), {}


def _sdxl_inputs(model: Any) -> Pair:
    added = {"text_embeds": torch.zeros(1, 1280), "time_ids": torch.zeros(1, 6)}
    context = {"encoder_hidden_states": torch.zeros(1, 77, 2048), "added_cond_kwargs": added, "return_dict": False}
    return (torch.zeros(1, 4, 64, 64), torch.zeros(1, dtype=torch.long)), context


def _flux_inputs(model: Any) -> Pair:
    tokens = {"hidden_states": torch.zeros(1, 64, 64), "encoder_hidden_states": torch.zeros(1, 77, 4096)}
    ids = {"img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(77, 3)}
    scalars = {"timestep": torch.zeros(1), "guidance": torch.zeros(1), "pooled_projections": torch.zeros(1, 768)}
    return (), {**tokens, **ids, **scalars, "return_dict": False}


def _sd3_inputs(model: Any) -> Pair:
    tokens = {"hidden_states": torch.zeros(1, 16, 64, 64), "encoder_hidden_states": torch.zeros(1, 77, 4096)}
    return (), {**tokens, "pooled_projections": torch.zeros(1, 2048), "timestep": torch.zeros(1), "return_dict": False}


SDXL = {
    "block_out_channels": (320, 640, 1280), "layers_per_block": 2, "cross_attention_dim": 2048,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20), "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
"""The published shape of SDXL's UNet."""
FLUX = {"guidance_embeds": True, "num_layers": 4, "num_single_layers": 8}
SD3 = {"num_layers": 24, "caption_projection_dim": 1536, "num_attention_heads": 24, "joint_attention_dim": 4096}
SMALL_LLAMA = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}

TIMM = (
    "vit_base_patch16_224", "convnext_base", "swin_base_patch4_window7_224", "resnet50", "efficientnet_b3",
    "mixer_b16_224", "maxvit_tiny_tf_224", "deit3_base_patch16_224", "beit_base_patch16_224", "regnety_032",
)  # fmt: skip
TORCHVISION = (
    "resnet50", "vit_b_16", "convnext_base", "swin_t", "swin_v2_t", "regnet_y_8gf", "densenet121", "efficientnet_b0",
    "maxvit_t", "mobilenet_v3_large",
)  # fmt: skip

OTHERS: dict[str, Other] = {
    "torch: nn.Transformer": Other((), plain.Translation, lambda model: ((_ids(), _ids()), {})),
    "torch: LSTM": Other((), plain.LSTMModel, lambda model: ((_ids(),), {})),
    "torch: attention stack": Other((), plain.AttentionStack, lambda model: ((torch.zeros(1, 128, 1024),), {})),
    "torch: diffusion UNet": Other((), plain.UNet, _unet_inputs),
    "torch: DiT": Other((), plain.DiT, _dit_inputs),
    "lora: llama": Other(
        ("peft",), partial(_lora, "llama", "LlamaForCausalLM", ["q_proj", "v_proj"], **SMALL_LLAMA), _made
    ),
    "lora: gpt2": Other(("peft",), partial(_lora, "gpt2", "GPT2LMHeadModel", ["c_attn"]), _made),
    "lora: t5": Other(("peft",), partial(_lora, "t5", "T5ForConditionalGeneration", ["q", "v"]), _made),
    "lora: vit": Other(("peft",), partial(_lora, "vit", "ViTForImageClassification", ["q_proj", "v_proj"]), _made),
    "lora: qwen3_moe": Other(
        ("peft",), partial(_lora, "qwen3_moe", "Qwen3MoeForCausalLM", ["q_proj", "v_proj"], num_hidden_layers=4), _made
    ),
    "diffusers: SDXL UNet": Other(
        ("diffusers",), partial(_of, "diffusers", "UNet2DConditionModel", **SDXL), _sdxl_inputs
    ),
    "diffusers: Flux": Other(("diffusers",), partial(_of, "diffusers", "FluxTransformer2DModel", **FLUX), _flux_inputs),
    "diffusers: SD3": Other(("diffusers",), partial(_of, "diffusers", "SD3Transformer2DModel", **SD3), _sd3_inputs),
    **{f"timm: {name}": Other(("timm", "torchvision"), partial(_timm, name), _image) for name in TIMM},
    **{f"torchvision: {name}": Other(("torchvision",), partial(_torchvision, name), _image) for name in TORCHVISION},
}
