"""A configuration becomes the model that it describes, without weights, network or untrusted code."""

import json
from pathlib import Path

import pytest
import torch

from autoshard.errors import ModelLoadError
from autoshard.integrations.transformers import build_from_config, is_config
from tests.integrations.conftest import LLAMA

pytestmark = pytest.mark.slow


def test_the_class_is_the_one_that_is_named(write_config) -> None:
    path = write_config(**LLAMA, architectures=["LlamaForSequenceClassification"])
    built = build_from_config(str(path))
    assert type(built.model).__name__ == "LlamaForSequenceClassification"
    assert not any(text.startswith("model=") for text in built.assumed)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (LLAMA, "LlamaForCausalLM"),
        (
            {"model_type": "t5", "num_layers": 1, "d_model": 16, "d_ff": 16, "vocab_size": 32},
            "T5ForConditionalGeneration",
        ),
        ({"model_type": "vit", "num_hidden_layers": 1}, "ViTForImageClassification"),
        ({"model_type": "vit_mae", "num_hidden_layers": 1}, "ViTMAEModel"),
        ({**LLAMA, "architectures": ["NobodysModel"]}, "LlamaForCausalLM"),
    ],
)
def test_otherwise_the_best_auto_class_is_taken_and_told(write_config, fields: dict, expected: str) -> None:
    built = build_from_config(str(write_config(**fields)))
    assert type(built.model).__name__ == expected
    assert [text for text in built.assumed if text.startswith(f"model={expected} (")]


def test_a_folder_and_a_file_are_the_same(write_config, tmp_path: Path) -> None:
    path = write_config(**LLAMA)
    assert is_config(str(path))
    assert is_config(str(tmp_path))
    assert not is_config(str(tmp_path / "model.py"))
    models = [build_from_config(str(place)).model for place in (path, tmp_path)]
    assert [str(model) for model in models] == [str(models[0])] * 2


def test_as_it_is_trained_without_memory(write_config) -> None:
    built = build_from_config(str(write_config(**LLAMA, dtype="bfloat16", use_cache=True)))
    assert built.model.training
    assert {param.device.type for param in built.model.parameters()} == {"meta"}
    assert {param.dtype for param in built.model.parameters()} == {torch.float32}
    assert "parameters=float32 (the configuration names bfloat16)" in built.assumed
    assert built.model.config.use_cache is False
    assert built.model.config._attn_implementation == "sdpa"


def test_attention_that_needs_a_gpu_is_exchanged_and_told(write_config) -> None:
    built = build_from_config(str(write_config(**LLAMA, attn_implementation="flash_attention_2")))
    assert built.model.config._attn_implementation == "sdpa"
    assert "attention=sdpa (flash_attention_2 runs on a GPU only)" in built.assumed


def test_attention_that_was_chosen_stays(write_config) -> None:
    built = build_from_config(str(write_config(**LLAMA, attn_implementation="eager")))
    assert built.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("text", "reason", "line"),
    [
        ('{"model_type": "llama",\n', "not JSON", 2),
        ("[1]", "holds a list", 0),
        ("{}", "no model_type", 0),
        ('{"model_type": "nobodys"}', "does not know model_type 'nobodys'", 0),
        (json.dumps({**LLAMA, "hidden_size": "wide"}), "hidden_size", 0),
        (json.dumps({**LLAMA, "vocab_size": -1}), "failed", 0),
    ],
)
def test_what_cannot_be_built_is_told_with_a_remedy(tmp_path: Path, text: str, reason: str, line: int) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelLoadError) as caught:
        build_from_config(str(path))
    assert caught.value.source == str(path)
    assert reason in caught.value.reason
    assert caught.value.line == line
    assert caught.value.remedy


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        build_from_config(str(tmp_path / "config.json"))


CUSTOM = """
import torch
from transformers import PretrainedConfig, PreTrainedModel


class OwnConfig(PretrainedConfig):
    model_type = "own"


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.head = torch.nn.Linear(4, config.width)
        self.post_init()

    def forward(self, pixel_values):
        return self.head(pixel_values)
"""


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with code of its own beside it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "code.py").write_text(CUSTOM)
    auto_map = {"AutoConfig": "code.OwnConfig", "AutoModel": "code.OwnModel"}
    fields = {"model_type": "own", "width": 6, "auto_map": auto_map, "architectures": ["OwnModel"]}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_custom_code_is_not_run_unless_trusted(custom: Path) -> None:
    (custom / "code.py").write_text("raise SystemExit('untrusted code ran')")
    with pytest.raises(ModelLoadError, match="code of its own") as caught:
        build_from_config(str(custom))
    assert "--trust-remote-code" in caught.value.remedy


def test_trusted_code_builds_its_model(custom: Path) -> None:
    model = build_from_config(str(custom), trust_remote_code=True).model
    assert type(model).__name__ == "OwnModel"
    assert model.head.weight.shape == (6, 4)
    assert model.head.weight.device.type == "meta"
