"""flash_attn exchanged: the tensors that it keeps, the values that it gives, and models that are written for it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.capture import build_model, load_model_file
from autoshard.capture import flash_attention as flash
from autoshard.capture.substitute import substituted
from autoshard.errors import ModelLoadError

BATCH, SEQ, HEADS, KV_HEADS, WIDTH = 2, 24, 6, 2, 16
CAUSAL: dict[str, Any] = {"is_causal": True, "enable_gqa": True}


def _saved(run: Any, *shapes: tuple[int, ...]) -> int:
    """Bytes of the tensors that a call keeps for backward, each storage once."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = run(*tensors)
        out.sum().backward()
        assert all(tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in tensors)
    return sum(sizes.values())


def test_it_keeps_what_flash_attn_keeps() -> None:
    q, kv = (BATCH, SEQ, HEADS, WIDTH), (BATCH, SEQ, KV_HEADS, WIDTH)
    saved = _saved(lambda q, k, v: flash.flash_attn_func(q, k, v, causal=True), q, kv, kv)
    tensors = 2 * BATCH * SEQ * HEADS * WIDTH + 2 * BATCH * SEQ * KV_HEADS * WIDTH  # q and out, k and v
    sums = BATCH * HEADS * SEQ
    assert saved == 2 * tensors + 4 * sums + 8 * 2 + 8  # the state of the random numbers is 2 numbers; one is unused


def test_heads_of_other_sizes_are_padded() -> None:
    shape = (1, SEQ, HEADS, 12)
    saved = _saved(lambda q, k, v: flash.flash_attn_func(q, k, v), shape, shape, shape)
    assert saved == 2 * 4 * SEQ * HEADS * 16 + 4 * HEADS * SEQ + 24


def test_packed_sequences_keep_their_borders_too() -> None:
    shape = (SEQ, HEADS, WIDTH)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        borders = torch.zeros(4, dtype=torch.int32)
        return flash.flash_attn_varlen_func(q, k, v, borders, borders, 9, 9, causal=True)

    assert _saved(run, shape, shape, shape) == 2 * 4 * SEQ * HEADS * WIDTH + 4 * HEADS * SEQ + 24 + 4 * 4


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    parts = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True, **options).transpose(1, 2)


def test_its_values_are_those_of_attention() -> None:
    q, k, v = (
        _random(BATCH, SEQ, HEADS, WIDTH),
        *(_random(BATCH, SEQ, KV_HEADS, WIDTH + n)[..., :WIDTH] for n in (0, 1)),
    )
    torch.testing.assert_close(flash.flash_attn_func(q, k, v), _expected(q, k, v))
    torch.testing.assert_close(flash.flash_attn_func(q, k, v, causal=True), _expected(q, k, v, is_causal=True))
    torch.testing.assert_close(flash.flash_attn_func(q, k, v, softmax_scale=0.5), _expected(q, k, v, scale=0.5))
    packed = torch.stack([q[:, :, :KV_HEADS], k, v], dim=2)
    torch.testing.assert_close(flash.flash_attn_qkvpacked_func(packed), _expected(q[:, :, :KV_HEADS], k, v))


def test_a_window_is_seen_from_the_end() -> None:
    """The last query stands at the last key, as in the documentation of flash_attn 2.1."""
    q, k = _random(1, 2, 1, 4), _random(1, 5, 1, 4)
    allowed = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]], dtype=torch.bool)
    found = flash.flash_attn_func(q, k, k, causal=True, window_size=(1, 0))
    torch.testing.assert_close(found, _expected(q, k, k, mask=allowed))


def test_a_soft_cap_and_slopes() -> None:
    q = _random(1, 3, 1, 2)
    scores = (q[0, :, 0] @ q[0, :, 0].T) / math.sqrt(2)
    capped = 5 * torch.tanh(scores / 5)
    slanted = scores - 0.25 * (torch.arange(3)[:, None] - torch.arange(3)[None, :]).abs()
    for options, weights in (({"softcap": 5.0}, capped), ({"alibi_slopes": torch.tensor([0.25])}, slanted)):
        found = flash.flash_attn_func(q, q, q, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(found[0, :, 0], weights.softmax(-1) @ q[0, :, 0])


def test_packed_sequences_do_not_see_each_other() -> None:
    lengths = (3, 7, 5)
    q = _random(sum(lengths), HEADS, WIDTH)
    borders = torch.tensor([0, 3, 10, 15], dtype=torch.int32)
    found = flash.flash_attn_varlen_func(q, q, q, borders, borders, 7, 7, causal=True)
    parts = [_expected(*(part[None],) * 3, is_causal=True)[0] for part in q.split(lengths)]
    torch.testing.assert_close(found, torch.cat(parts))


def test_padding_is_left_out_and_put_back() -> None:
    x, mask = _random(2, 4, 3), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    packed, indices, borders, longest, lengths = flash.unpad_input(x, mask)
    assert (borders.tolist(), longest, lengths.tolist()) == ([0, 3, 5], 3, [3, 2])
    torch.testing.assert_close(packed, torch.cat([x[0, :3], x[1, :2]]))
    torch.testing.assert_close(flash.pad_input(packed, indices, 2, 4), x * mask[..., None])
    torch.testing.assert_close(flash.index_first_axis(x.flatten(0, 1), indices), packed)


MODEL = """
import torch
from torch import nn
from flash_attn import flash_attn_func, __version__
from flash_attn.bert_padding import unpad_input


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        from flash_attn.flash_attn_interface import flash_attn_varlen_func
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        return flash_attn_func(q, k, v, causal=True)


def build_model():
    return Attends()


def example_inputs(batch=None, seq=None):
    return (torch.zeros(1, 5, 8),), {}
"""


def test_a_model_file_that_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from autoshard.pipeline import plan_model_file
    from autoshard.request import Request

    for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    request = Request(device="h100-80gb", devices=2)
    with pytest.raises(ModelLoadError, match="AS105: flash_attn runs on a GPU only") as caught:
        plan_model_file(str(path), request)
    assert "--attention sdpa" in caught.value.remedy
    plan = plan_model_file(str(path), request, attention="sdpa", verify="dry-run").plan
    assert "attention=sdpa (in place of flash_attn and flash_attention_2)" in plan.provenance.assumed
    assert plan.soundness == "dry-run"
    assert "flash_attn" not in sys.modules


def test_what_it_does_not_offer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("from flash_attn import flash_attn_with_kvcache\n")
    with substituted("sdpa"), pytest.raises(ModelLoadError, match="flash_attn_with_kvcache"):
        build_model(load_model_file(str(path)), "sdpa")


def test_the_values_are_computed_by_a_model_too() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            return flash.flash_attn_func(*self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2), causal=True)

    model, x = Attends(), _random(2, 5, 8)
    model(x).sum().backward()
    assert model.qkv.weight.grad is not None
    assert model.qkv.weight.grad.abs().sum() > 0
