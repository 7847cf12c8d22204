"""Made inputs: the real model, with weights, runs a training step on them.

The inputs are made for a twin on the meta device; the oracle is the library's own forward and backward on real
tensors.
"""

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.errors import ModelLoadError
from autoshard.integrations.transformers import has_config, make_inputs
from autoshard.pipeline import make_plan
from autoshard.request import Request
from autoshard.runtime.dryrun import dry_run

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE = {"image_size": 32, "patch_size": 8}
T5 = {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
SPEECH = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


def llava() -> Any:
    """64 / 8 patches along each edge, all of which become features but the class token."""
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT, num_key_value_heads=2, max_position_embeddings=128),
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=64, patch_size=8),
        image_token_id=90,
    )


def qwen2_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    return transformers.Qwen2VLConfig(
        text_config={**TEXT, "num_key_value_heads": 2, "rope_parameters": rope, "max_position_embeddings": 512},
        vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 14},
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )


MODELS = {
    "causal": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**TEXT, num_key_value_heads=2)),
    "masked": ("BertForMaskedLM", lambda: transformers.BertConfig(**TEXT)),
    "classes": ("BertForSequenceClassification", lambda: transformers.BertConfig(**TEXT)),
    "tokens": ("BertForTokenClassification", lambda: transformers.BertConfig(**TEXT)),
    "questions": ("BertForQuestionAnswering", lambda: transformers.BertConfig(**TEXT)),
    "roberta": ("RobertaForMaskedLM", lambda: transformers.RobertaConfig(**TEXT, max_position_embeddings=66)),
    "seq2seq": ("T5ForConditionalGeneration", lambda: transformers.T5Config(**T5, decoder_start_token_id=0)),
    "image": ("ViTForImageClassification", lambda: transformers.ViTConfig(**VISION, **SQUARE)),
    "convolution": (
        "ResNetForImageClassification",
        lambda: transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1]),
    ),
    "contrast": (
        "CLIPModel",
        lambda: transformers.CLIPConfig(
            text_config={**TEXT, "max_position_embeddings": 20, "eos_token_id": 98},
            vision_config={**VISION, **SQUARE},
            projection_dim=8,
        ),
    ),
    "speech": (
        "WhisperForConditionalGeneration",
        lambda: transformers.WhisperConfig(
            **SPEECH, vocab_size=99, d_model=16, num_mel_bins=8, max_source_positions=30, max_target_positions=40,
            encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1,
        ),
    ),
    "image and text": ("LlavaForConditionalGeneration", llava),
    "image of an odd size": (
        "PerceiverForImageClassificationLearned",
        lambda: transformers.PerceiverConfig(
            image_size=20, num_latents=4, d_latents=8, d_model=12, num_blocks=1, num_self_attends_per_block=1,
            num_self_attention_heads=2, num_cross_attention_heads=2, num_labels=3,
        ),
    ),
    "image grid": ("Qwen2VLForConditionalGeneration", qwen2_vl),
}  # fmt: skip


def twins(name: str) -> tuple[nn.Module, nn.Module]:
    """The model on meta and a real one."""
    class_name, config = MODELS[name]
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        meta = model_class(config())
    return meta.train(), model_class(config()).train()


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_trains_on_them(name: str) -> None:
    meta, real = twins(name)
    made = make_inputs(meta, name, seq=None if name in ("contrast", "speech", "roberta") else 48)
    args, kwargs = made.pair
    outputs = real(*args, **kwargs)
    loss = outputs.loss
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    unused = [key for key, param in real.named_parameters() if param.requires_grad and param.grad is None]
    # Of the pooled class token only a classifier makes use; LLaVA leaves out its tower's last layer.
    assert all("pooler" in key or "post_layernorm" in key or ".layers.1." in key for key in unused), unused


def test_as_many_placeholders_as_the_model_makes_features() -> None:
    ids = make_inputs(twins("image and text")[0], "llava", batch=2, seq=100).pair[1]["input_ids"]
    assert ids.shape == (2, 100)
    assert (ids == 90).sum(1).tolist() == [64, 64]
    grown = make_inputs(twins("image and text")[0], "llava", seq=10).pair[1]["input_ids"]
    assert (grown == 90).sum() == 64


def test_an_image_grid_and_its_placeholders_belong_together() -> None:
    kwargs = make_inputs(twins("image grid")[0], "qwen2-vl", image_size=64, seq=48).pair[1]
    # 64 pixels are four whole patches of 14, which is two pairs of patches along each edge.
    assert kwargs["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert kwargs["pixel_values"].shape == (16, 3 * 2 * 14 * 14)
    assert (kwargs["input_ids"] == 90).sum() == 4
    assert torch.equal(kwargs["mm_token_type_ids"] == 1, kwargs["input_ids"] == 90)


def test_sizes_that_are_given_are_used_and_not_assumed() -> None:
    model = twins("causal")[0]
    made = make_inputs(model, "m", batch=3, seq=7)
    assert made.pair[1]["input_ids"].shape == made.pair[1]["labels"].shape == (3, 7)
    assert [text.partition("=")[0] for text in made.assumed] == ["inputs"]
    image = make_inputs(twins("convolution")[0], "m", batch=2, image_size=40)
    assert image.pair[1]["pixel_values"].shape == (2, 3, 40, 40)


def test_sizes_that_are_not_given_are_assumed_and_told() -> None:
    made = make_inputs(twins("roberta")[0], "m")
    assert made.pair[1]["input_ids"].shape == (1, 64)
    assert made.assumed[1:] == ("batch=1 (default)", "seq=64 (the longest that the model takes)")
    assert "image_size=32x32 (the configuration)" in make_inputs(twins("image")[0], "m").assumed


class NeedsTwo(nn.Module):
    """Batch statistics of single values, as projection heads have them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.ViTConfig(image_size=4)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        batch, channels, _, _ = pixel_values.shape
        return self.norm(pixel_values.reshape(batch, channels, -1).mean(2))


def test_two_samples_where_one_does_not_run() -> None:
    made = make_inputs(NeedsTwo(), "m")
    assert made.pair[1]["pixel_values"].shape[0] == 2
    assert "batch=2 (it does not run with 1)" in made.assumed
    with pytest.raises(ModelLoadError, match="more than 1 value per channel"):
        make_inputs(NeedsTwo(), "m", batch=1)


class Strange(NeedsTwo):
    def forward(self, pixel_values: torch.Tensor, phase_of_moon: torch.Tensor) -> torch.Tensor:
        return pixel_values


def test_a_text_alone_where_no_form_of_the_image_runs() -> None:
    config = llava()
    config.image_token_id = None
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(config)
    made = make_inputs(model, "m")
    assert set(made.pair[1]) == {"input_ids", "labels"}
    assert any(each.startswith("left out=pixel_values (") for each in made.assumed)


class _Watching(nn.Module):
    """A model that is for inference only; ``session`` is an argument that nobody could make."""

    config = transformers.PretrainedConfig()

    @torch.inference_mode()
    def forward(self, session: Any) -> Any:
        return session


def test_a_forward_in_inference_mode_has_no_training_step() -> None:
    with pytest.raises(ModelLoadError, match=r"_Watching runs under torch\.inference_mode"):
        make_inputs(_Watching(), "m")


def test_an_argument_that_nobody_knows_is_named() -> None:
    with pytest.raises(ModelLoadError, match="phase_of_moon") as caught:
        make_inputs(Strange(), "m")
    assert "example_inputs()" in caught.value.remedy


def test_nothing_of_the_trials_stays_in_the_model() -> None:
    model = twins("image and text")[0]
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    make_inputs(model, "m", seq=80)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert {param.device.type for param in model.parameters()} == {"meta"}


def test_other_models_are_left_alone() -> None:
    assert not has_config(nn.Linear(2, 2))
    assert has_config(twins("causal")[0])


def test_a_plan_is_made_of_them() -> None:
    model = twins("image and text")[0]
    made = make_inputs(model, "m", seq=100)
    plan = make_plan(model, made.pair, request=Request(device="cpu", devices=2, root_percent=0))
    assert plan.provenance.loss == "outputs.loss"
    units = {module for unit in plan.units for module in unit.modules}
    assert any("vision_tower" in module for module in units)


@pytest.mark.parametrize("name", ["image and text", "contrast", "seq2seq"])
def test_the_plan_runs_sharded(name: str) -> None:
    """A tower that is a unit still records the hidden states that its parent asks for."""
    model = twins(name)[0]
    made = make_inputs(model, "m", seq=None if name == "contrast" else 100)
    plan = make_plan(model, made.pair, request=Request(device="cpu", devices=2, root_percent=0))
    assert [finding for finding in dry_run(model, plan, made.pair) if finding.severity == "error"] == []
