"""The attention kernel of a CUDA device, chosen on a machine without one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as bound_early

from autoshard.capture import capture
from tests.capture.memory import replay
from tests.models import build, floats

FLASH = "aten._scaled_dot_product_flash_attention.default"
EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"


class Attends(nn.Module):
    """Attention over its input; the linear layer gives it something to train."""

    def __init__(self, attend: Any = None, heads: int = 2, early: bool = False, **options: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.heads, self.options = heads, options
        self.function = bound_early if early else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        query = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = query[:, : self.options.get("key_heads", self.heads)]
        options = {k: v for k, v in self.options.items() if k != "key_heads"}
        if options.get("attn_mask") == "bool":
            options["attn_mask"] = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        attend = self.function or F.scaled_dot_product_attention
        return attend(query, key, key, **options)


def _kernels(model: nn.Module, shape: tuple[int, ...], dtype: str = "bfloat16", device: str = "cuda") -> set[str]:
    graph = capture(model, ((floats(*shape),), {}), compute_dtype=dtype, device_kind=device)
    return {op.target for op in graph.root.forward if "attention" in op.target}


@pytest.mark.parametrize(
    ("options", "dtype", "kernel"),
    [
        ({}, "bfloat16", FLASH),
        ({"early": True}, "bfloat16", FLASH),
        ({"is_causal": True, "dropout_p": 0.1}, "float16", FLASH),
        ({"heads": 4, "key_heads": 2, "enable_gqa": True}, "bfloat16", FLASH),
        ({"heads": 1}, "float32", EFFICIENT),
        ({"heads": 1, "attn_mask": "bool"}, "bfloat16", EFFICIENT),
        ({"heads": 4, "attn_mask": "bool"}, "bfloat16", None),
        ({"heads": 4, "key_heads": 2, "enable_gqa": True}, "float32", None),
    ],
)
def test_the_kernel_that_cuda_picks(options: dict[str, Any], dtype: str, kernel: str | None) -> None:
    found = _kernels(Attends(**options), (2, 6, 8), dtype)
    assert found == ({kernel} if kernel else set())


def test_the_cpu_keeps_its_own_choice() -> None:
    assert _kernels(Attends(), (2, 6, 8), device="cpu") == {"aten._scaled_dot_product_flash_attention_for_cpu.default"}


def test_multihead_attention_is_reached_too() -> None:
    model, inputs = build("attention")
    graph = capture(model, inputs, compute_dtype="bfloat16", device_kind="cuda")
    assert FLASH in {op.target for op in graph.root.forward}
    assert FLASH.replace("attention.", "attention_backward.") in {op.target for op in graph.root.backward}


def test_dropout_does_not_make_a_matrix_of_scores_on_cuda() -> None:
    def held(device: str, length: int) -> int:
        graph = capture(
            Attends(dropout_p=0.1), ((floats(1, length, 8),), {}), compute_dtype="bfloat16", device_kind=device
        )
        return replay(graph.root)[0]

    assert held("cuda", 512) < 2.1 * held("cuda", 256)
    assert held("cpu", 512) > 3 * held("cpu", 256)


def test_dropout_in_attention_is_a_trait() -> None:
    for rate, traits in ((0.1, ("dropout",)), (0.0, ())):
        graph = capture(Attends(dropout_p=rate), ((floats(2, 6, 8),), {}), compute_dtype="bfloat16", device_kind="cuda")
        assert graph.modules[0].traits == traits
