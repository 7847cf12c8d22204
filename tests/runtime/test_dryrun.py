"""The dry run finds every fault of a plan that FSDP2 has, also the silent ones, and nothing in plans that are right."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import CaptureError, Diagnostic, RequestError
from autoshard.plan import Precision
from autoshard.runtime import dry_run
from tests.runtime import faulty
from tests.runtime.plans import decide

pytestmark = pytest.mark.slow

BF16 = Precision(param="bfloat16", reduce="float32")


def rows() -> Any:
    return (torch.randn(2, faulty.WIDTH),), {}


def sequences() -> Any:
    return (torch.randn(2, 4, faulty.WIDTH),), {}


def tokens() -> Any:
    return (torch.zeros(2, 3, dtype=torch.long),), {}


def units(*names: str | tuple[str, ...], reshard: bool = True, root: bool = False) -> list[Any]:
    return [((name,) if isinstance(name, str) else name, reshard) for name in names] + [(("",), root)]


def clear() -> nn.Module:
    return faulty.Passed(faulty.ClearPair)


LAYERS = ("layers.0", "layers.1", "layers.2")

# Each: model, units, inputs, other decisions; what FSDP2 does with it is told by its own source or an experiment.
BROKEN: dict[str, tuple[Callable[[], nn.Module], list[Any], Callable[[], Any], dict[str, Any], str, str]] = {
    "opaque output": (faulty.Passed, units("first", "second"), rows, {}, "AS403", "Opaque"),
    "stashed auxiliary loss": (faulty.Stashed, units("first", "second"), rows, {}, "AS403", "kept on a module"),
    "opaque root": (faulty.OpaqueRoot, units(), rows, {}, "AS404", "Opaque"),
    "opaque root that reshards": (faulty.OpaqueRoot, units(root=True), rows, {}, "AS404", "Opaque"),
    "functional head": (faulty.FunctionalHead, units("embed", "block"), tokens, {}, "AS402", "embed.weight"),
    "tied in two units": (faulty.Tied, units("embed", "block", "head"), tokens, {}, "AS401", "head.weight"),
    "tied, one in the root": (faulty.Tied, units("embed", "block"), tokens, {}, "AS401", "head.weight"),
    "out_proj of attention": (faulty.Attention, units("attend.out_proj"), sequences, {}, "AS402", "out_proj"),
    "empty parameter": (faulty.Empty, units("linear"), rows, {}, "AS402", "nothing"),
    "view changed in place": (faulty.InPlace, units("enter", "linear"), sequences, {}, "AS403", "view"),
    "alias of a parameter": (faulty.Alias, units("linear"), rows, {}, "AS402", "scale"),
    "forward called directly": (faulty.DirectCall, units("first", "second"), rows, {}, "AS402", "unit second"),
    "last of a list is dropped": (faulty.LeftOver, units(("first", "second")), rows, {}, "AS403", "second, which"),
    "dtypes clash": (faulty.TableBefore, units("enter"), rows, {"precision": BF16}, "AS402", "dtype"),
    "sparse gradient": (faulty.Sparse, units("table"), tokens, {}, "AS214", "table.weight"),
    "weight written in forward": (faulty.Remembering, units("linear"), rows, {}, "AS216", "linear writes"),
    "outer unit first": (faulty.Stack, units("layers.0", "layers.0.up"), rows, {}, "AS401", "several"),
    "no root": (faulty.Stack, units("layers.0")[:-1], rows, {}, "AS401", "root"),
    "container": (faulty.Stack, units("layers"), rows, {}, "AS401", "ModuleList"),
    "unknown module": (faulty.Stack, units("layers.7"), rows, {}, "AS401", "layers.7"),
    "dim that is not divided": (
        faulty.Stack, units("layers.0"), rows, {"shard_dims": {"layers.0.up.weight": 1}, "shards": 3},
        "AS401", "divide",
    ),
    "unknown entry": (faulty.Stack, units(), rows, {"entry": "encode"}, "AS401", "encode"),
}  # fmt: skip

RIGHT: dict[str, tuple[Callable[[], nn.Module], list[Any], Callable[[], Any], dict[str, Any]]] = {
    "results in dataclasses": (clear, units("first", "second"), rows, {}),
    "opaque but unsharded": (faulty.Passed, units("first", "second", reshard=False), rows, {}),
    "opaque inside the root": (faulty.Passed, units("head"), rows, {}),
    "tied in a list": (faulty.Tied, units("block", ("embed", "head")), tokens, {}),
    "tied in the root": (faulty.Tied, units("block"), tokens, {}),
    "reader owns": (faulty.Attention, units("attend"), sequences, {}),
    "empty is replicated": (faulty.Empty, units("linear"), rows, {"replicated": ("nothing",)}),
    "view, out of place": (faulty.OutOfPlace, units("enter", "linear"), sequences, {}),
    "dtypes meet": (faulty.TableBefore, units("enter", "head"), rows, {"precision": BF16}),
    "stack": (faulty.Stack, units(*LAYERS), rows, {}),
    "list unit": (faulty.Stack, units(*LAYERS, ("norm", "head")), rows, {}),
    "nested": (faulty.Stack, units("layers.0.up", "layers.0.down", *LAYERS), rows, {}),
    "root reshards": (faulty.Stack, units(*LAYERS, root=True), rows, {}),
    "recompute": (faulty.Stack, units(*LAYERS), rows, {"recompute": ("layers.0", "layers.1.up", "layers.2")}),
    "recompute around units": (
        faulty.Stack, units("layers.0.up", "layers.0.down", *LAYERS), rows, {"recompute": ("layers.0",)},
    ),
    "two axes": (faulty.Stack, units(*LAYERS), rows, {"shards": 4, "replicas": 2}),
    "sixty-four ranks": (faulty.Stack, units(*LAYERS), rows, {"shards": 64}),
    "other dim": (faulty.Stack, units(*LAYERS), rows, {"shard_dims": {"layers.0.up.weight": 1}}),
    "other entry": (faulty.Stack, units(*LAYERS), rows, {"entry": "training_step"}),
    "mixed precision": (faulty.Stack, units(*LAYERS), rows, {"precision": BF16}),
    "frozen unit of another dtype": (faulty.frozen_base, units(*LAYERS), rows, {}),
    "units of two dtypes": (faulty.two_dtypes, units(*LAYERS), rows, {}),
    "unused parameters are reduced": (faulty.Unused, units("used"), rows, {"reduce_unused": True}),
}  # fmt: skip


def _loss(outputs: Any) -> torch.Tensor:
    return (outputs.h if isinstance(outputs, faulty.Opaque) else outputs).float().square().sum()


def _run(
    build: Callable[[], nn.Module], named: list[Any], given: Callable[[], Any], other: Any
) -> Sequence[Diagnostic]:
    model = build()
    return dry_run(model, decide(model, named, **other), given(), loss=_loss)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_an_error_that_names_its_reason(name: str) -> None:
    build, named, given, other, code, word = BROKEN[name]
    errors = [found for found in _run(build, named, given, other) if found.severity == "error"]
    assert [found.code for found in errors] == [code] * len(errors) != []
    assert any(word in str(found) for found in errors), errors


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_a_plan_that_is_right(name: str) -> None:
    assert [str(found) for found in _run(*RIGHT[name]) if found.severity != "note"] == []


def test_alike_findings_are_one() -> None:
    found = _run(*BROKEN["opaque output"][:4])
    assert len(found) == 1
    assert found[0].where == "second"  # backward meets it first
    assert "1 more alike: first" in found[0].message


def test_units_that_wait_for_the_end_of_backward_are_noted() -> None:
    branches = [f"branches.{i}" for i in range(3)]
    (found,) = _run(faulty.Branches, units(*branches), rows, {})
    assert (found.code, found.severity) == ("AS406", "note")
    assert found.where in branches
    assert "1 more alike" in found.message  # the last one in backward delays nothing


def test_a_unit_that_never_runs_is_noted() -> None:
    (found,) = _run(faulty.Unused, units("used", "unused"), rows, {})
    assert (found.code, found.severity, found.where) == ("AS407", "note", "unused")


def test_a_loss_in_low_precision_is_noted() -> None:
    model = faulty.Stack()
    (found,) = dry_run(model, decide(model, units(*LAYERS), precision=BF16), rows(), loss=torch.sum)
    assert (found.code, found.severity) == ("AS408", "note")
    output = Precision(param="bfloat16", reduce="float32", output="float32")
    plan = decide(model, units(*LAYERS, ("norm", "head")), precision=output)
    assert dry_run(model, plan, rows(), loss=torch.sum) == ()


LEFT, RIGHT_WAY = (((torch.ones(2, faulty.WIDTH), is_left), {}) for is_left in (True, False))


def test_every_pair_of_inputs_is_run() -> None:
    model = faulty.Fork()
    plan = decide(model, units("left", "right"))
    assert [(found.code, found.where) for found in dry_run(model, plan, [LEFT])] == [("AS407", "right")]
    assert [(found.code, found.where) for found in dry_run(model, plan, [RIGHT_WAY])] == [("AS407", "left")]
    found = dry_run(model, plan, [LEFT, RIGHT_WAY])
    assert [each.code for each in found] == ["AS218", "AS407"]
    assert "forever" in found[0].message


def test_ranks_that_train_different_parameters_need_all_of_them_reduced() -> None:
    model = faulty.Fork()
    (found,) = dry_run(model, decide(model, units()), [LEFT, RIGHT_WAY])
    assert (found.code, found.severity, found.where) == ("AS239", "error", "reduce_unused")
    assert dry_run(model, decide(model, units(), reduce_unused=True), [LEFT, RIGHT_WAY]) == ()


def test_what_gets_a_gradient_may_be_told() -> None:
    model = faulty.Unused()
    plan = decide(model, units("used"))
    assert dry_run(model, plan, rows(), trained=set()) == ()
    found = dry_run(model, plan, rows(), trained={"unused.up.weight"})
    assert [(each.code, each.where) for each in found] == [("AS405", "unused.up.weight")]


@pytest.mark.parametrize("name", ["opaque output", "outer unit first", "functional head", "empty parameter"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    build, named, given, other, *_ = BROKEN[name]
    model = build()
    model.eval()
    hook = model.register_forward_hook(lambda *_: None)
    plan, inputs = decide(model, named, **other), given()
    before = _state(model)
    dry_run(model, plan, inputs, loss=_loss)
    assert _state(model) == before
    hook.remove()
    assert not dist.is_initialized()
    model(*inputs[0])  # it still runs, without FSDP2
    again = decide(model, units())
    assert [found.code for found in dry_run(model, again, inputs, loss=_loss)] in ([], ["AS402"])


def _state(model: nn.Module) -> list[Any]:
    state: list[Any] = [(key, id(param), param.grad) for key, param in model.named_parameters(remove_duplicate=False)]
    state += [(key, id(buffer)) for key, buffer in model.named_buffers()]
    for module in model.modules():
        hooks = {name: len(value) for name, value in vars(module).items() if "hooks" in name}
        state.append((type(module), module.training, sorted(vars(module)), hooks))
    return [*state, sys.excepthook, torch.initial_seed(), torch.get_rng_state().tolist()]


def test_a_model_on_meta_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = faulty.Stack()
    assert dry_run(model, decide(model, units(*LAYERS), shards=64), rows()) == ()
    assert all(param.is_meta for param in model.parameters())


def test_another_number_of_ranks() -> None:
    model = faulty.Stack()
    dims = {"layers.0.up.weight": 1}
    plan = decide(model, units(*LAYERS), shard_dims=dims)
    assert dry_run(model, plan, rows(), world=16) == ()
    assert [found.code for found in dry_run(model, plan, rows(), world=48)] == ["AS401"]
    two_axes = decide(model, units(*LAYERS), replicas=2)
    with pytest.raises(RequestError, match="2 axes"):
        dry_run(model, two_axes, rows(), world=16)


def test_a_process_group_that_exists_is_refused_and_kept() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = faulty.Stack()
        with pytest.raises(RequestError, match="before init_process_group"):
            dry_run(model, decide(model, units()), rows())
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_a_step_that_fails_unsharded_is_no_finding() -> None:
    model = faulty.Stack()
    with pytest.raises(CaptureError):
        dry_run(model, decide(model, units()), ((torch.randn(2, 5),), {}))


LARGE = """
import resource, sys, time, warnings
sys.path.insert(0, "examples")
from autoshard.capture import build_model, capture, load_model_file
from autoshard.plan import load_plan
from autoshard.runtime import dry_run
file = load_model_file("examples/llama_8b.py")
model = build_model(file)
from tests.runtime.plans import decide
from autoshard.plan import Precision
layers = [((f"layers.{i}",), True) for i in range(32)]
units = [(("embed",), True), *layers, (("norm", "head"), False), (("",), False)]
recompute = tuple(f"layers.{i}" for i in range(0, 32, 2))
precision = Precision(param="bfloat16", reduce="float32")
plan = decide(model, units, shards=64, recompute=recompute, precision=precision)
start = time.process_time()
found = dry_run(model, plan, file.inputs(), device_kind="cuda")
print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, *found)
"""


@pytest.mark.slow
def test_eight_billion_parameters_on_sixty_four_ranks() -> None:
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", LARGE], cwd=root, capture_output=True, text=True, check=True)
    seconds, num_bytes, *found = done.stdout.split(maxsplit=2)
    assert found == []
    assert int(num_bytes) < 3 * 2**30
    assert float(seconds) < 15  # of the processor: the machine may be shared
