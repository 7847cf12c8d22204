"""``autoshard plan`` on a configuration, and on a model file that gives no inputs."""

from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.plan import load_plan
from tests.integrations.conftest import LLAMA

pytestmark = pytest.mark.slow

REQUEST = ["--device", "cpu", "--devices", "2", "--root-percent", "0", "--quiet"]


def test_a_configuration_is_planned(write_config, tmp_path: Path, capsys) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(write_config(**LLAMA)), "-o", str(out), "--seq", "24", *REQUEST]) == 0
    plan = load_plan(out)
    assert {module for unit in plan.units for module in unit.modules} >= {"model.layers.0", "model.layers.1", ""}
    assert plan.provenance.inputs == ("input_ids: int64[1, 24]", "labels: int64[1, 24]")
    assumed = [text.partition("=")[0] for text in plan.provenance.assumed]
    assert assumed[-4:] == ["model", "attention", "inputs", "batch"]
    assert "inputs, batch" in capsys.readouterr().out


def test_the_folder_will_do_and_the_tree_needs_no_inputs(write_config, tmp_path: Path) -> None:
    write_config(**LLAMA)
    out = tmp_path / "plan.json"
    assert main(["plan", str(tmp_path), "-o", str(out), "--frontend", "tree", *REQUEST]) == 0
    plan = load_plan(out)
    assert plan.soundness == "assumed"
    assert not any(text.startswith("inputs") for text in plan.provenance.assumed)


def test_a_configuration_that_is_none_ends_with_2(write_config, capsys) -> None:
    assert main(["plan", str(write_config(model_type="nobodys")), *REQUEST]) == 2
    assert "remedy:" in capsys.readouterr().err


MODEL_FILE = """
from transformers import LlamaConfig, LlamaForCausalLM

def build_model():
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128))
"""


def test_a_model_file_without_inputs(tmp_path: Path) -> None:
    path, out = tmp_path / "model.py", tmp_path / "plan.json"
    path.write_text(MODEL_FILE)
    assert main(["plan", str(path), "-o", str(out), "--batch", "2", *REQUEST]) == 0
    provenance = load_plan(out).provenance
    assert provenance.inputs[0] == "input_ids: int64[2, 128]"
    assert "seq=128 (the longest that the model takes)" in provenance.assumed


def test_its_own_inputs_come_first(tmp_path: Path) -> None:
    path, out = tmp_path / "model.py", tmp_path / "plan.json"
    inputs = "import torch\ndef example_inputs():\n    return (torch.zeros(1, 5, dtype=torch.long),), {}\n"
    path.write_text(MODEL_FILE + inputs)
    assert main(["plan", str(path), "-o", str(out), *REQUEST]) == 0
    assert load_plan(out).provenance.inputs == ("0: int64[1, 5]",)
    assert main(["plan", str(path), "--image-size", "8", *REQUEST]) == 2


def test_other_models_still_need_inputs(tmp_path: Path, capsys) -> None:
    path = tmp_path / "model.py"
    path.write_text("import torch\nmodel = torch.nn.Linear(2, 2)\n")
    assert main(["plan", str(path), *REQUEST]) == 2
    assert "it has no example inputs" in capsys.readouterr().err
