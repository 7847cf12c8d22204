"""What a fingerprint is made of, and the name of the device of this machine."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autoshard.capture import capture, find_accelerator, fingerprint_items
from autoshard.plan.fingerprint import FingerprintItems, fingerprint
from tests.models import MODELS, LanguageModel, build


@pytest.mark.parametrize("name", sorted(MODELS))
def test_model_and_graph_have_the_same_items(name: str) -> None:
    model, inputs = build(name)
    graph = capture(model, inputs, compute_dtype="bfloat16")
    from_graph = FingerprintItems(
        params=tuple((p.key, p.aliases, p.shape, p.dtype, p.requires_grad) for p in graph.params),
        buffers=tuple(b.name for b in graph.buffers),
    )
    items = fingerprint_items(model)
    assert fingerprint(items, [""]) == fingerprint(from_graph, [""])
    assert fingerprint(items, [""]) == fingerprint(fingerprint_items(build(name, "meta")[0]), [""])
    assert list(items.params) == sorted(items.params)


def test_what_changes_it() -> None:
    def digest(model: nn.Module) -> str:
        return fingerprint(fingerprint_items(model), [""])

    plain, tied, half = LanguageModel(), LanguageModel(tied=True), LanguageModel().bfloat16()
    frozen = LanguageModel()
    frozen.head.weight.requires_grad = False
    assert len({digest(model) for model in (plain, tied, half, frozen)}) == 4
    with torch.no_grad():
        plain.head.weight.zero_()
    assert digest(plain) == digest(LanguageModel())


@pytest.mark.parametrize(
    ("name", "gib", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA H200", 139.7, "h200"),
        ("NVIDIA H200 NVL", 139.8, "h200-140gb"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("AMD Instinct MI300X", 191.7, "mi300x"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", 23.6, "nvidia-geforce-rtx-4090-d-24gb"),
        ("NVIDIA H100 NVL", 93.1, "h100-93gb"),
        ("NVIDIA GeForce RTX 5090", 31.4, "nvidia-geforce-rtx-5090-31gb"),
    ],
)
def test_devices_by_name_and_memory(monkeypatch: pytest.MonkeyPatch, name: str, gib: float, profile: str) -> None:
    found = SimpleNamespace(name=name, total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert find_accelerator() == (profile, 4)


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_accelerator() is None
