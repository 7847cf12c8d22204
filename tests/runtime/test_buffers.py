"""Non-persistent buffers of models on meta: rebuilt where the constructor tells, guarded where it does not."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.errors import ApplyError, PlanMismatchError
from autoshard.runtime import apply_plan
from autoshard.runtime.buffers import lost_buffers
from tests.runtime.models import WIDTH, Stack, inputs, loss_of
from tests.runtime.plans import decide
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.slow

BUFFER = "turn.angles"
UNITS = [(("layers.0",), True), (("",), False)]


class Turn(nn.Module):
    """A computed buffer; all constructor arguments are attributes."""

    def __init__(self, base: float, width: int = WIDTH) -> None:
        super().__init__()
        self.base, self.width = base, width
        self.register_buffer("angles", base ** (-torch.arange(width) / width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos()


class Forgetful(Turn):
    """One constructor argument is no attribute."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale * 7.0)


class Changing(Turn):
    """An attribute of an argument's name that holds something else."""

    def __init__(self, base: float) -> None:
        super().__init__(2 * base)


class Random(Turn):
    """What it computes is drawn."""

    def __init__(self, base: float) -> None:
        super().__init__(base)
        self.angles.uniform_()


class Turned(Stack):
    def __init__(self, turn: type[Turn] = Turn, argument: float = 11.0) -> None:
        super().__init__()
        self.turn = turn(argument)

    def forward(self, x: Tensor) -> Tensor:
        x = self.turn(self.enter(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.gain)


@pytest.fixture
def group_of_two() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _on_meta(turn: type[Turn] = Turn) -> Turned:
    with torch.device("meta"):
        return Turned(turn)


def test_a_value_is_known_where_the_constructor_tells() -> None:
    (lost,) = lost_buffers(_on_meta(), {BUFFER})
    assert lost.name == BUFFER
    assert torch.equal(lost.value, Turned().turn.angles)


def test_nothing_is_lost_on_a_real_model() -> None:
    assert lost_buffers(Turned(), {BUFFER}) == ()


@pytest.mark.parametrize("turn", [Forgetful, Changing, Random])
def test_in_doubt_no_value_is_taken(turn: type[Turn]) -> None:
    (lost,) = lost_buffers(_on_meta(turn), {BUFFER})
    assert lost.value is None


def test_the_draws_of_the_user_are_not_moved() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    lost_buffers(_on_meta(Random), {BUFFER})
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.usefixtures("group_of_two")
def test_what_cannot_be_rebuilt_is_told_and_stops_the_first_forward() -> None:
    model = _on_meta(Forgetful)
    with pytest.warns(UserWarning, match=r"turn\.angles"):
        apply_plan(model, decide(model, UNITS, rebuilt_buffers=(BUFFER,)))
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.zeros_(param)
    with pytest.raises(ApplyError, match="nothing has computed") as caught:
        model(inputs(model, 0, 0))
    assert caught.value.modules == (BUFFER,)
    model.turn.angles.copy_(torch.ones(WIDTH))
    assert torch.isfinite(model(inputs(model, 0, 0))).all()


@pytest.mark.usefixtures("group_of_two")
def test_a_buffer_that_the_plan_does_not_name_is_guarded_too() -> None:
    model = _on_meta()
    with pytest.warns(UserWarning, match=r"turn\.angles"):
        apply_plan(model, decide(model, UNITS))
    model.to_empty(device="cpu")
    assert model.turn.angles.isnan().all()


@pytest.mark.usefixtures("group_of_two")
def test_a_buffer_that_does_not_exist_is_a_difference() -> None:
    with pytest.raises(PlanMismatchError, match="no buffer of that name"):
        apply_plan(Turned(), decide(Turned(), UNITS, rebuilt_buffers=("turn.angels",)))


def _train(rank: int, world: int) -> list[float]:
    """Losses of three steps: the reference's and those of the model from meta, in turn."""
    torch.manual_seed(3)
    reference = Turned()
    model = _on_meta()
    apply_plan(model, decide(model, UNITS, rebuilt_buffers=(BUFFER,)))
    model.to_empty(device="cpu")
    assert torch.equal(model.turn.angles, reference.turn.angles)
    weights = {key: one.clone() for key, one in reference.state_dict().items()}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    found = []
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (reference, model)]
    for step in range(3):
        for other in range(world):
            loss = loss_of(reference(inputs(reference, step, other)))
            if other == rank:
                found.append(loss.item())
            (loss / world).backward()
        loss = loss_of(model(inputs(model, step, rank)))
        found.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_a_model_from_meta_trains_like_the_reference() -> None:
    for losses in run_ranks(_train):
        assert losses[1::2] == pytest.approx(losses[::2], rel=1e-5)
        assert losses[0] != losses[2]
