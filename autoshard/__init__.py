"""autoshard: a compiler-style planner for PyTorch FSDP2.

The public names, loaded on first use so that ``import autoshard`` costs nothing and imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "AutoshardError": "autoshard.errors",
    "ApplyError": "autoshard.errors",
    "CaptureError": "autoshard.errors",
    "Diagnostic": "autoshard.errors",
    "GraphError": "autoshard.errors",
    "InfeasibleBudgetError": "autoshard.errors",
    "ModelLoadError": "autoshard.errors",
    "NoLegalUnitError": "autoshard.errors",
    "PlanFormatError": "autoshard.errors",
    "PlanMismatchError": "autoshard.errors",
    "PlanVersionError": "autoshard.errors",
    "PlanningError": "autoshard.errors",
    "RankDisagreementError": "autoshard.errors",
    "RequestError": "autoshard.errors",
    "VerificationError": "autoshard.errors",
    "Request": "autoshard.request",
    "Plan": "autoshard.plan",
    "load_plan": "autoshard.plan",
    "save_plan": "autoshard.plan",
    "make_plan": "autoshard.pipeline",
    "accumulate": "autoshard.runtime",
    "apply_plan": "autoshard.runtime",
    "read_plan": "autoshard.runtime",
    "clip_grad_norm_": "autoshard.runtime",
    "make_optimizer": "autoshard.runtime",
    "format_plan": "autoshard.report",
}

__all__ = [
    "__version__",
    "ApplyError",
    "AutoshardError",
    "CaptureError",
    "Diagnostic",
    "GraphError",
    "InfeasibleBudgetError",
    "ModelLoadError",
    "NoLegalUnitError",
    "Plan",
    "PlanFormatError",
    "PlanMismatchError",
    "PlanVersionError",
    "PlanningError",
    "RankDisagreementError",
    "Request",
    "RequestError",
    "VerificationError",
    "accumulate",
    "apply_plan",
    "clip_grad_norm_",
    "format_plan",
    "load_plan",
    "make_optimizer",
    "make_plan",
    "read_plan",
    "save_plan",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if TYPE_CHECKING:
    from autoshard.errors import (
        ApplyError,
        AutoshardError,
        CaptureError,
        Diagnostic,
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
    from autoshard.pipeline import make_plan
    from autoshard.plan import Plan, load_plan, save_plan
    from autoshard.report import format_plan
    from autoshard.request import Request
    from autoshard.runtime import accumulate, apply_plan, clip_grad_norm_, make_optimizer, read_plan
