"""The tracker against sums that are plain to see."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.runtime.live_bytes import LiveBytes, held_bytes


def test_birth_death_and_peak() -> None:
    live = LiveBytes("cpu")
    with live:
        first = torch.empty(1000, dtype=torch.float32)
        second = torch.empty(300, dtype=torch.float64)
        assert live.now == 4000 + 2400
        del first
        assert live.now == 2400
        third = torch.empty(1, dtype=torch.int8)
        assert live.now == 2401
        assert live.peak == 6400
        live.restart_peak()
        assert live.peak == 2401
    del second, third
    assert live.now == 0


def test_views_share_their_storage() -> None:
    live = LiveBytes("cpu")
    with live:
        whole = torch.zeros(10, 10)
        parts = [whole[0], whole.t(), whole.view(-1)]
        assert live.now == 400
        del whole
        assert live.now == 400
        del parts
        assert live.now == 0


def test_resize_in_place_is_followed() -> None:
    live = LiveBytes("cpu")
    with live:
        tensor = torch.zeros(100)
        tensor.untyped_storage().resize_(0)
        assert live.now == 0
        tensor.untyped_storage().resize_(400)
        assert live.now == 400
    before = torch.UntypedStorage.resize_
    with live:
        pass
    assert torch.UntypedStorage.resize_ is before


def test_what_was_there_before_counts_only_if_followed() -> None:
    there, unseen = torch.zeros(5), torch.zeros(7)
    live = LiveBytes("cpu")
    live.follow([there, None])
    with live:
        assert live.now == 20
        doubled = unseen * 2
        assert live.now == 20 + 28
    del doubled


def test_autograd_and_its_saved_tensors() -> None:
    weight = torch.ones(50, requires_grad=True)
    live = LiveBytes("cpu")
    live.follow([weight])
    with live:
        loss = (weight.exp().sin()).sum()  # exp and sin are both kept for backward, sin's result is not
        assert live.now == 200 + 200 + 4
        loss.backward()
        del loss
        assert live.now == 200 + 200
    assert held_bytes([weight, weight.grad, weight[:3], None]) == 400


def test_fake_and_meta_tensors_hold_no_bytes() -> None:
    live = LiveBytes("cpu")
    with live, FakeTensorMode():
        fake = torch.empty(1000)
    with live:
        meta = torch.empty(1000, device="meta")
    assert live.now == 0
    assert held_bytes([fake, meta]) == 0
