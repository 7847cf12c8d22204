"""Code that runs on a GPU only, recognised by what it raises on a machine without one.

Packages of GPU kernels fail in many ways where there is no GPU: they are not installed, their import looks for a
driver, or their first call does. The user is told which package it is and what to write instead, rather than to install
a package that cannot be installed.
"""

import traceback
from pathlib import Path

CODE = "AS105"
SDPA = (
    "use torch.nn.functional.scaled_dot_product_attention there (attn_implementation='sdpa' in transformers): on CUDA "
    "it runs the same kernel and keeps the same tensors for backward"
)
PLAIN = "take a plain torch implementation where torch.cuda.is_available() is false, or plan on a machine with a GPU"
EXCHANGE = f"plan with --attention sdpa, which exchanges its calls, or {SDPA}"
REMEDIES = {
    "flash_attn": EXCHANGE,
    "flash_attn_interface": SDPA,
    "flashinfer": SDPA,
    "xformers": SDPA,
    "liger_kernel": "plan without Liger's kernels: they keep fewer activations than the torch ops that they replace, "
    "so the plan also fits with them",
    "bitsandbytes": "plan the model with torch.nn.Linear and the parameters' own dtype: quantised parameters cannot be "
    "captured off the GPU",
    "triton": PLAIN,
    "transformer_engine": PLAIN,
    "apex": PLAIN,
    "mamba_ssm": PLAIN,
    "causal_conv1d": PLAIN,
    "fla": PLAIN,
    "deep_gemm": PLAIN,
    "natten": PLAIN,
    "vllm": PLAIN,
}
"""Packages of GPU kernels by the name that is imported, and what to write instead."""

DRIVER = (
    "found no nvidia driver", "no cuda gpus are available", "not compiled with cuda enabled", "libcuda.so",
    "0 active drivers", "cuda driver initialization failed", "no nvidia gpu", "cuda is not available",
)  # fmt: skip
"""What errors say, in small letters, where a GPU is missing."""


def remedy_without_gpu(error: BaseException) -> tuple[str, str] | None:
    """Which code needs a GPU and what to write instead; ``None`` if the error has another reason.

    Args:
        error: what importing, building or running the user's code raised.
    """
    package = _package(error)
    if package:
        return f"{package} runs on a GPU only", REMEDIES[package]
    text = str(error).lower()
    if any(words in text for words in DRIVER):
        return "this code runs on a GPU only", PLAIN
    return None


def _package(error: BaseException) -> str:
    """The package of GPU kernels that could not be imported, or that failed as it looked for a GPU."""
    if isinstance(error, ImportError):
        named = (error.name or "").partition(".")[0]
        if named in REMEDIES:
            return named
        if "flashattention" in str(error).lower():  # as transformers names it where the package is missing
            return "flash_attn"
        words = set(str(error).replace("`", " ").replace("'", " ").replace(".", " ").split())
        return next((name for name in REMEDIES if name in words), "")
    if any(words in str(error).lower() for words in DRIVER):
        for frame in traceback.extract_tb(error.__traceback__):
            found = REMEDIES.keys() & set(Path(frame.filename).parts)
            if found:
                return min(found)
    return ""
