"""Models built without memory: what keeps its value, and which constructors need which way."""

import torch
from torch import nn

from autoshard.capture.build import on_meta


class Padded(nn.Module):
    """Keeps the sizes it computes as integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 7, stride=3)
        stride = torch.tensor(self.conv.stride[0], dtype=torch.int64)
        self.register_buffer("stride", stride)
        self.register_buffer("padding", torch.tensor(7, dtype=torch.int64) - stride)
        self.register_buffer("positions", torch.arange(5).expand(1, -1))
        self.register_buffer("scale", torch.ones(3))


class Mixing(nn.Module):
    """Computes a floating point buffer from integers and floating point tensors, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4) * torch.ones(4))


class Writing(nn.Module):
    """Writes a floating point tensor into an integer one: that one's value is not known."""

    def __init__(self) -> None:
        super().__init__()
        steps = torch.zeros(4, dtype=torch.long)
        steps[:] = torch.linspace(0, 9, 4)
        self.register_buffer("steps", steps)


def test_integers_keep_their_values_and_floats_take_no_memory() -> None:
    model = on_meta(Padded)
    assert [int(model.get_buffer(name)) for name in ("stride", "padding")] == [3, 4]
    assert model.get_buffer("positions").tolist() == [[0, 1, 2, 3, 4]]
    assert model.get_buffer("scale").is_meta
    assert all(param.is_meta for param in model.parameters())


def test_what_meets_a_meta_tensor_is_on_meta() -> None:
    assert on_meta(Mixing).get_buffer("table").is_meta


def test_a_value_that_is_not_known_is_not_made_up() -> None:
    assert on_meta(Writing).get_buffer("steps").is_meta


def test_large_integer_tensors_take_no_memory() -> None:
    def make() -> torch.Tensor:
        return torch.zeros(1 << 11, 1 << 11, dtype=torch.bool)

    assert on_meta(make).is_meta
