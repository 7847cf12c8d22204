"""Code that needs a GPU is recognised on a machine without one, with what to write instead."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.capture import build_model, capture, load_model_file
from autoshard.capture.gpu_only import REMEDIES, remedy_without_gpu
from autoshard.errors import CaptureError, ModelLoadError


def _load(tmp_path: Path, text: str) -> ModelLoadError:
    path = tmp_path / "model.py"
    path.write_text(text)
    with pytest.raises(ModelLoadError) as caught:
        build_model(load_model_file(str(path)))
    return caught.value


@pytest.mark.parametrize(
    "line",
    [
        "from flash_attn import flash_attn_func",
        "import flash_attn.bert_padding",
        "import triton.language as tl",
        "import bitsandbytes as bnb",
        "from liger_kernel.transformers import apply_liger_kernel_to_llama",
    ],
)
def test_a_missing_package_of_kernels_is_named_at_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    package = line.split()[1].partition(".")[0]
    monkeypatch.setitem(sys.modules, package, None)  # not to be imported, whether it is installed or not
    error = _load(tmp_path, f"import torch\n{line}\n")
    assert f"AS105: {package} runs on a GPU only" in error.reason
    assert error.remedy == REMEDIES[package]
    assert error.line == 2


def test_a_missing_package_of_another_kind_is_to_be_installed(tmp_path: Path) -> None:
    error = _load(tmp_path, "import nobodys_package\n")
    assert "AS105" not in error.reason
    assert "install" in error.remedy


def test_a_package_that_looks_for_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('0 active drivers ([]). There should only be one.')\n")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    error = _load(tmp_path, "import triton\n")
    assert "AS105: triton runs on a GPU only" in error.reason
    assert error.line == 1


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        raise RuntimeError("No CUDA GPUs are available")


def test_a_forward_that_needs_a_gpu() -> None:
    with pytest.raises(CaptureError, match="AS105: this code runs on a GPU only") as caught:
        capture(Calls(), ((torch.zeros(1, 2),), {}))
    assert "torch.cuda.is_available()" in caught.value.remedy


def test_other_errors_have_other_reasons() -> None:
    assert remedy_without_gpu(RuntimeError("the model is not available")) is None
    assert remedy_without_gpu(ImportError("cannot import name 'x' from 'y'", name="y")) is None
    assert remedy_without_gpu(ImportError("FlashAttention2 needs the `flash_attn` package")) is not None
    told = "FlashAttention2 has been toggled on, but the package for FlashAttention2 doesn't seem to be installed."
    assert remedy_without_gpu(ImportError(told)) == ("flash_attn runs on a GPU only", REMEDIES["flash_attn"])
