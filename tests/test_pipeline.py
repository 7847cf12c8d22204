"""The whole pipeline: every plan in ``plans/`` is made again and compared; Python and command line agree."""

import contextlib
import importlib.util
import re
import warnings
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import autoshard
from autoshard.cli.measure import require_same_model
from autoshard.errors import RequestError
from autoshard.pipeline import plan_model_file, verify_model
from autoshard.plan import decisions_of, encode_plan, load_plan
from autoshard.request import Request

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "plans").glob("*.py"))


def _made_again(source: Path) -> autoshard.Plan:
    spec = importlib.util.spec_from_file_location(f"plans_{source.stem}", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan_model_file(str(source), Request(**module.REQUEST)).plan


def _three_digits(value: object) -> object:
    if isinstance(value, int | float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {key: _three_digits(inner) for key, inner in value.items()}
    return value


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_sample_plan_is_made_again(source: Path, request: pytest.FixtureRequest) -> None:
    made = _made_again(source)
    committed = source.with_suffix(".json")
    if request.config.getoption("--update-golden"):
        committed.write_bytes(encode_plan(made))
    plan = load_plan(committed)
    assert decisions_of(made) == decisions_of(plan)
    assert made.fingerprint == plan.fingerprint
    assert _three_digits(msgspec.to_builtins(made.projection)) == _three_digits(msgspec.to_builtins(plan.projection))


def test_every_sample_plan_has_its_source_and_is_told() -> None:
    assert [path.stem for path in SOURCES] == sorted(path.stem for path in (ROOT / "plans").glob("*.json"))
    page = (ROOT / "plans" / "README.md").read_text()
    assert all(re.search(rf"\b{source.name}\b", page) for source in SOURCES)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def train_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


INPUTS = ((torch.zeros(4, 16),), {})
CPU = Request(device="cpu", devices=2)


def test_a_plan_of_a_real_model_equals_that_of_its_meta_twin() -> None:
    with torch.device("meta"):
        twin = _Net()
    assert autoshard.make_plan(_Net(), INPUTS, request=CPU) == autoshard.make_plan(twin, INPUTS, request=CPU)


def test_the_same_question_gives_the_same_bytes() -> None:
    first, second = (encode_plan(autoshard.make_plan(_Net(), INPUTS, request=CPU)) for _ in range(2))
    assert first == second


def test_without_loss_the_mean_square_is_taken_and_said() -> None:
    assert "mean square" in autoshard.make_plan(_Net(), INPUTS, request=CPU).provenance.loss


def test_entry_is_driving_and_read_back() -> None:
    plan = autoshard.make_plan(_Net(), INPUTS, entry="train_step", request=CPU)
    assert plan.entry == "train_step"


def test_inputs_may_be_a_list_or_a_callable() -> None:
    plain = autoshard.make_plan(_Net(), INPUTS, request=CPU)
    assert decisions_of(autoshard.make_plan(_Net(), [INPUTS, INPUTS], request=CPU)) == decisions_of(plain)
    called = autoshard.make_plan(_Net(), lambda batch=None, seq=None: INPUTS, request=CPU)
    assert decisions_of(called) == decisions_of(plain)


def test_no_inputs_is_an_error_that_says_how_to_give_them() -> None:
    with pytest.raises(RequestError, match="example_inputs"):
        autoshard.make_plan(_Net(), request=CPU)


def test_the_tree_frontend_needs_no_inputs_and_marks_the_plan() -> None:
    plan = autoshard.make_plan(_Net(), request=CPU, frontend="tree")
    assert plan.soundness == "assumed"
    assert plan.provenance.frontend == "tree"
    assert "which the module tree does not show" in plan.projection.not_modelled[0]
    traced = autoshard.make_plan(_Net(), INPUTS, request=CPU)
    assert plan.projection.reduce_scatter_bytes == traced.projection.reduce_scatter_bytes > 0
    assert [unit.modules for unit in plan.units[:3]] == [(f"blocks.{index}",) for index in range(3)]


def test_compiled_blocks_stand_in_the_plan_with_their_uncertainty() -> None:
    request = Request(device="cpu", devices=2, compile="blocks")
    plan = autoshard.make_plan(_Net(), INPUTS, request=request)
    assert plan.compile == ("blocks.0", "blocks.1", "blocks.2")
    assert "0.59 to 1.00 times the activations that are projected, over 5 models" in plan.projection.not_modelled[0]
    plain = autoshard.make_plan(_Net(), INPUTS, request=CPU)
    assert plain.compile == ()
    assert not any("torch.compile" in what for what in plain.projection.not_modelled)
    assert plain.units == plan.units
    assert plain.fingerprint != plan.fingerprint or set(plan.compile) <= plain.named_modules
    with pytest.raises(RequestError, match="one of none, blocks"):
        autoshard.make_plan(_Net(), INPUTS, request=Request(device="cpu", devices=2, compile="all"))  # type: ignore[arg-type]


def test_defaults_are_named() -> None:
    plan = autoshard.make_plan(_Net(), INPUTS)
    named = " ".join(plan.provenance.assumed)
    assert all(field in named for field in ("device=", "devices=", "memory=", "precision="))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"request": {}}, "request"),
        ({"loss": 3}, "loss"),
        ({"entry": 5}, "entry"),
        ({"entry": ""}, "entry"),
        ({"request": Request(mesh=4)}, "mesh"),  # type: ignore[arg-type]
        ({"request": Request(mesh="²")}, "mesh"),
        ({"request": Request(mesh="²x4")}, "mesh"),
        ({"request": Request(device=5)}, "device"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_question_names_the_field(options: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        autoshard.make_plan(_Net(), INPUTS, **options)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_recompute_full_is_done_or_answered_with_a_plan_without() -> None:
    full = Request(device="cpu", devices=2, recompute="full")
    assert len(autoshard.make_plan(_Net(), INPUTS, request=full).recompute) == 3
    single = autoshard.make_plan(nn.Linear(16, 4), INPUTS, request=full)
    assert single.recompute == ()
    assert "no block recomputes" in autoshard.format_plan(single)


def test_a_module_registered_inside_itself_is_one_error() -> None:
    net = _Net()
    net.head.me = net.head
    with pytest.raises(autoshard.CaptureError, match="inside itself"):
        autoshard.make_plan(net, INPUTS, request=CPU)


def test_a_closure_over_a_parameter_leaves_no_gradient_behind() -> None:
    net = _Net()
    weight = net.head.weight
    net.head.forward = lambda x: x @ weight.T  # type: ignore[method-assign]
    with contextlib.suppress(autoshard.AutoshardError):
        autoshard.make_plan(net, INPUTS, request=CPU)
    assert net.head.weight.grad is None


@pytest.mark.parametrize("method", ["blocks", "nope:forward", "head:nope", "head:__init__", "head:weight"])
def test_a_method_that_is_none_is_refused_before_planning(method: str) -> None:
    with pytest.raises(RequestError) as caught:
        autoshard.make_plan(_Net(), INPUTS, request=Request(device="cpu", devices=2, methods=(method,)))
    assert caught.value.field == "method"


def test_a_method_is_registered_only_where_its_module_is_a_unit() -> None:
    request = Request(device="cpu", devices=2, methods=("blocks.0:extra_repr", "blocks.0.1:extra_repr"), root_percent=0)
    plan = autoshard.make_plan(_Net(), INPUTS, request=request)
    assert [(method.module, method.method) for method in plan.methods] == [("blocks.0", "extra_repr")]


def test_no_baseline_that_fits_is_faster() -> None:
    plan = autoshard.make_plan(_Net(), INPUTS, request=replace(CPU, root_percent=100))
    fits = [each for each in plan.alternatives if each.verdict == "fits"]
    assert fits
    assert plan.projection.step_ns <= min(each.step_ns for each in fits)


def test_measuring_another_model_names_the_differences() -> None:
    plan = autoshard.make_plan(_Net(), INPUTS, request=Request(device="cpu", devices=2, root_percent=0))
    require_same_model(plan, _Net())
    with pytest.raises(autoshard.PlanMismatchError) as caught:
        require_same_model(plan, nn.Linear(16, 4))
    assert {difference.where for difference in caught.value.differences} >= {"blocks.0", "head", "fingerprint"}


class _Codec(nn.Module):
    """Has no forward; two methods run it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class _WithCodec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codec = _Codec()
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.codec.decode(torch.relu(self.codec.encode(x))))


def test_methods_make_a_module_a_unit() -> None:
    without = autoshard.make_plan(_WithCodec(), INPUTS, request=replace(CPU, root_percent=0))
    assert [unit.modules for unit in without.units] == [("head",), ("",)]
    request = Request(device="cpu", devices=2, methods=("codec:encode", "codec:decode"), root_percent=0)
    model = _WithCodec()
    plan = autoshard.make_plan(model, INPUTS, request=request)
    assert ("codec",) in [unit.modules for unit in plan.units]
    assert [(each.module, each.method) for each in plan.methods] == [("codec", "encode"), ("codec", "decode")]
    assert "encode" not in vars(model.codec)
    assert [each for each in verify_model(model, plan, INPUTS, level="dry-run") if each.severity == "error"] == []
    one = Request(device="cpu", devices=2, methods=("codec:encode",), root_percent=0)
    assert ("codec",) not in [unit.modules for unit in autoshard.make_plan(_WithCodec(), INPUTS, request=one).units]


class _Table(nn.Module):
    """A buffer in float32 meets the parameters of ``head``."""

    def __init__(self, is_hidden: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.register_buffer("table", torch.ones(16))
        self.head = nn.Linear(16, 4)
        self.is_hidden = is_hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x) + self.table
        return h @ self.head.weight.t() if self.is_hidden else self.head(h)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_plan_does_not_fail_in_the_precision_that_it_states(is_hidden: bool) -> None:
    """As a unit, ``head`` casts what comes in; read by the root, it cannot."""
    model = _Table(is_hidden)
    plan = autoshard.make_plan(model, INPUTS, request=Request(device="h100-80gb", devices=8, precision="bf16"))
    codes = {each.code for each in plan.diagnostics}
    assert "AS101" in codes
    assert ("AS302" in codes) == is_hidden
    assert plan.precision.param == ("same" if is_hidden else "bfloat16")
    assert [each for each in verify_model(model, plan, INPUTS, level="dry-run") if each.severity == "error"] == []
