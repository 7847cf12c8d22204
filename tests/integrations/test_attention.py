"""A transformers model that asks for flash attention, planned where it is not."""

from pathlib import Path

import pytest

from autoshard.errors import ModelLoadError
from autoshard.pipeline import plan_model_file
from autoshard.request import Request

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

MODEL = """
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=97)


def build_model():
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation={implementation!r})
"""


def _plan(tmp_path: Path, implementation: str, attention: str | None) -> object:
    from autoshard.integrations.transformers import make_inputs

    path = tmp_path / f"{implementation}.py"
    path.write_text(MODEL.format(implementation=implementation))

    def inputs(model: object) -> object:
        made = make_inputs(model, "llama", seq=32)  # type: ignore[arg-type]
        return made.pair, made.assumed

    request = Request(device="h100-80gb", devices=2)
    return plan_model_file(str(path), request, attention=attention, default_inputs=inputs)  # type: ignore[arg-type]


def test_flash_attention_is_planned_as_sdpa(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="AS105"):
        _plan(tmp_path, "flash_attention_2", None)
    found = _plan(tmp_path, "flash_attention_2", "sdpa")
    direct = _plan(tmp_path, "sdpa", None)
    assert found.plan.units == direct.plan.units  # type: ignore[attr-defined]
    assert found.plan.projection == direct.plan.projection  # type: ignore[attr-defined]
    kernels = {op.target for op in found.graph.root.forward if "attention" in op.target}  # type: ignore[attr-defined]
    assert kernels == {"aten._scaled_dot_product_flash_attention.default"}
