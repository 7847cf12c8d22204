"""The error tree: data in the fields, the message made from them, one exit code for each branch."""

import copy
import pickle

import pytest

import autoshard
from autoshard import errors
from autoshard.errors import (
    ApplyError,
    AutoshardError,
    CaptureError,
    Diagnostic,
    Difference,
    GraphError,
    InfeasibleBudgetError,
    ModelLoadError,
    NoLegalUnitError,
    PlanFormatError,
    PlanMismatchError,
    PlanningError,
    PlanVersionError,
    RankDisagreementError,
    RequestError,
    VerificationError,
)

TIED = Diagnostic(code="AS203", severity="error", where="head", message="is tied to embed", remedy="untie them")
UNUSED = Diagnostic(code="AS299", severity="error", where="(root)", message="holds no parameter")
GIB = 2**30

EXAMPLES: dict[str, tuple[AutoshardError, int]] = {
    "RequestError": (RequestError("memory", "60 bananas", "a positive size"), 2),
    "ModelLoadError": (ModelLoadError("model.py", "build_model raised KeyError: 'x'", "run the file alone", 17), 2),
    "CaptureError": (CaptureError("layers.3.mlp", "aten::foo has no fake kernel", "register one"), 6),
    "GraphError": (GraphError(("op 3 reads storage 9, which is not born", "call 2 names no region")), 1),
    "PlanningError": (PlanningError("nothing to plan"), 3),
    "InfeasibleBudgetError": (
        InfeasibleBudgetError(4 * GIB, 7 * GIB, "experts", "backward, experts", ("memory=7GiB", "devices=16")),
        3,
    ),
    "NoLegalUnitError": (NoLegalUnitError((TIED, UNUSED)), 3),
    "PlanFormatError": (PlanFormatError("$.units[0].reshard", "must be true or false", "plan.json"), 4),
    "PlanVersionError": (PlanVersionError(3, (1, 2), "plan.json"), 4),
    "PlanMismatchError": (
        PlanMismatchError(tuple(Difference(where=f"p{i}", planned="(2, 3)", found="(3, 2)") for i in range(22))),
        5,
    ),
    "RankDisagreementError": (
        RankDisagreementError("plan", ((0, 2), (1,)), ("units[0].reshard: true", "units[0].reshard: false")),
        5,
    ),
    "ApplyError": (ApplyError(("norm", ""), "shard", "ValueError: no parameters"), 7),
    "VerificationError": (VerificationError((TIED,)), 8),
}


def test_each_class_has_an_example() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, AutoshardError) and value is not AutoshardError
    }
    assert classes == set(EXAMPLES)


def test_each_public_class_is_the_one_of_the_tree() -> None:
    for name in EXAMPLES:
        assert getattr(autoshard, name) is getattr(errors, name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_exit_code_and_message(name: str, golden) -> None:
    error, exit_code = EXAMPLES[name]
    assert type(error).__name__ == name
    assert error.exit_code == exit_code
    golden(f"errors/{name}.txt", f"{error}\n")


@pytest.mark.parametrize("name", EXAMPLES)
def test_errors_survive_another_process(name: str) -> None:
    error, _ = EXAMPLES[name]
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert vars(other) == vars(error)
        assert str(other) == str(error)
    assert hash(error) is not None


@pytest.mark.parametrize("error", [EXAMPLES[name][0] for name in ("RequestError", "PlanFormatError")])
def test_wrong_values_are_value_errors_too(error: AutoshardError) -> None:
    assert isinstance(error, ValueError)


def test_fields_carry_the_data() -> None:
    infeasible = EXAMPLES["InfeasibleBudgetError"][0]
    assert isinstance(infeasible, InfeasibleBudgetError)
    assert infeasible.missing_bytes == 3 * GIB
    version = EXAMPLES["PlanVersionError"][0]
    assert isinstance(version, PlanVersionError)
    assert (version.where, version.found, version.supported) == ("$.version", 3, (1, 2))


def test_a_diagnostic_in_one_line() -> None:
    assert str(TIED) == "AS203 error: head: is tied to embed — untie them"
    assert str(UNUSED) == "AS299 error: (root): holds no parameter"


def test_each_error_of_the_user_has_a_remedy_line() -> None:
    for name in ("RequestError", "ModelLoadError", "CaptureError", "PlanMismatchError", "RankDisagreementError"):
        assert str(EXAMPLES[name][0]).splitlines()[-1].startswith("  remedy: "), name
    assert str(RequestError("devices", 0, "1 or more", "count them")).endswith("\n  remedy: count them")


def test_a_large_value_does_not_fill_the_screen() -> None:
    assert len(str(RequestError("plan", "x" * 10_000, "a plan"))) < 400


def test_ranks_that_agree_are_told_by_number() -> None:
    error = RankDisagreementError("model", ((0,), (1, 2), (3,)), ("parameter a", "parameter b"))
    assert "rank 0; ranks 1, 2; rank 3" in str(error)
    assert "first difference: rank 0: parameter a; ranks 1, 2: parameter b" in str(error)
