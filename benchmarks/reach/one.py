"""One model: built, given inputs, planned, verified by the rules and by a dry run, and judged."""

import resource
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard.errors import AutoshardError, CaptureError, InfeasibleBudgetError, NoLegalUnitError, VerificationError
from benchmarks.reach.architectures import make

SEQ = 64
MACHINES = (("h100-80gb", 8), ("h100-80gb", 64), ("h100-80gb", 512), ("b200", 512))
"""Where eight devices are too few, more are asked for; where one layer is too large for a device, a larger one."""
ROOT_PERCENT = 25
TAIL = 6
"""Frames of a traceback that are kept."""

Stage = Callable[[str], None]


def run_one(name: str, cls: str, attempt: Callable[[Stage], dict[str, Any]]) -> dict[str, Any]:
    """The row of one model; whatever goes wrong is its result.

    Args:
        name: names the model.
        cls: its class.
        attempt: gives the facts of a sound plan, and is to tell each stage as it begins.
    """
    warnings.filterwarnings("ignore")
    row: dict[str, Any] = {"type": name, "class": cls, "outcome": "failed", "stage": "build"}

    def stage(name: str) -> None:
        row["stage"] = name

    try:
        row |= attempt(stage)
    except Exception as error:  # any failure of any model is a result
        row["reason"] = f"{type(error).__name__}: {error}"[:2000]
        row["tail"] = _places(error)
        if isinstance(error, NoLegalUnitError) or _is_lost_update(error) or _has_no_training_step(error):
            row["outcome"] = "refused"
        elif row["stage"] == "build":
            row["outcome"] = "not built"
        row["handled"] = isinstance(error, AutoshardError)
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return row


def _is_lost_update(error: Exception) -> bool:
    """Only AS216 was found: the forward writes to its parameters, which no plan of FSDP2 keeps."""
    return isinstance(error, VerificationError) and {d.code for d in error.violations} == {"AS216"}


def _has_no_training_step(error: Exception) -> bool:
    """Nothing that the model gives can be trained: no forward, one for inference only, or codes without a gradient."""
    reasons = (
        "no tensor in the outputs requires a gradient", "it has no training step", 'is missing the required "forward"',
    )  # fmt: skip
    return isinstance(error, AutoshardError) and any(reason in str(error) for reason in reasons)


def _places(error: BaseException) -> list[str]:
    """The last frames of an error, and the last ones of its cause in the model's own code."""
    found = [
        f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ][-TAIL:]
    cause = error.__cause__
    if cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        users = [frame for frame in frames if "/site-packages/" in frame.filename and "/torch/" not in frame.filename]
        found += [f"{Path(frame.filename).name}:{frame.lineno} {frame.line}" for frame in users[-3:]]
    return found


def architecture(kind: str, cls: str, *, is_full: bool, verify: str) -> Callable[[Stage], dict[str, Any]]:
    """The attempt at one of transformers' architectures."""

    def attempt(stage: Stage) -> dict[str, Any]:
        from autoshard.integrations.transformers import make_inputs
        from autoshard.integrations.transformers.facts import longest_text

        model, kept_depth = make(kind, cls, is_full=is_full)
        stage("inputs")
        made = make_inputs(model, kind, seq=min(SEQ, longest_text(model.config) or SEQ))
        facts = planned(model, made.pair, stage, verify=verify, assumed=made.assumed)
        return {**facts, "depth": "full" if kept_depth else "cut"}

    return attempt


def planned(
    model: Any, inputs: Any, stage: Stage, *, verify: str, loss: Any = None, assumed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The plan of a model, verified and judged."""
    from autoshard.pipeline import run_pipeline
    from autoshard.request import Request

    def ask(device: str, devices: int, precision: str) -> Any:
        request = Request(device=device, devices=devices, precision=precision, root_percent=ROOT_PERCENT)
        options: dict[str, Any] = {"progress": stage, "assumed": assumed, "verify": verify}
        return run_pipeline(model, inputs, loss=loss, entry="forward", request=request, **options)

    precision = "bf16"
    for device, devices in MACHINES:
        try:
            try:
                result = ask(device, devices, precision)
            except (VerificationError, CaptureError) as error:
                if precision == "fp32" or not _mixes_dtypes(error):
                    raise
                precision = "fp32"
                result = ask(device, devices, precision)
            break
        except InfeasibleBudgetError:
            if (device, devices) == MACHINES[-1]:
                raise
    stage("judging")
    stated = "fp32" if result.plan.precision.param == "same" else precision
    return {**judge(result), "device": device, "devices": devices, "precision": stated}


def _mixes_dtypes(error: AutoshardError) -> bool:
    """The model's own code meets tensors of two dtypes where its parameters compute in bf16: it trains in fp32 only."""
    text = str(error)
    return "bfloat16" in text.lower() and any(words in text for words in ("dtype", "scalar type", "DtypeClash"))


def judge(result: Any) -> dict[str, Any]:
    """Whether a verified plan counts as sound, and its facts."""
    sizes = {param.key: param.nbytes for param in result.graph.params}
    owned = root_params(result)
    total = sum(sizes.values())
    share = sum(owned.values()) / total if total else 0.0
    row: dict[str, Any] = {
        "outcome": "sound",
        "stage": "",
        "params": len(sizes),
        "gib": round(total / 2**30, 3),
        "units": len(result.plan.units),
        "root_share": round(share, 4),
        "soundness": result.plan.soundness,
        "optimal": result.plan.optimal.status,
        "loss": result.plan.provenance.loss,
        "codes": sorted({d.code for d in result.plan.diagnostics}),
        "inputs": list(result.plan.provenance.inputs),
    }
    if result.plan.soundness == "assumed":
        return row | {"outcome": "failed", "stage": "judging", "reason": "planned from the module tree"}
    if share <= ROOT_PERCENT / 100:
        return row
    largest = sorted(owned, key=lambda key: -owned[key])[:3]
    named = ", ".join(f"{key} {owned[key] / total:.0%}" for key in largest)
    row["reason"] = f"{share:.0%} of the parameters in the root: {named}"
    is_avoidable = divisible_bytes(result) > ROOT_PERCENT / 100 * total
    return row | {"outcome": "root" if is_avoidable else "sound", "stage": "judging"}


def root_params(result: Any) -> dict[str, int]:
    """Bytes of the parameters that the root unit owns, by key: those below no other unit."""
    units = {module for unit in result.plan.units for module in unit.modules if module}
    found = {}
    for param in result.graph.params:
        names = (param.key, *param.aliases)
        below = [any(name == unit or name.startswith(unit + ".") for unit in units) for name in names]
        if not any(below):
            found[param.key] = param.nbytes
    return found


def divisible_bytes(result: Any) -> int:
    """Bytes of the parameters that the root owns although a unit below it, of one module or of several, could."""
    units = {module for unit in result.plan.units for module in unit.modules}
    space = result.analysis.space
    below = {key for atom in space.atoms if atom.module not in units for key in atom.params}
    joint = {module for each in space.joint if not units & set(each) for module in each}
    shared = {
        param.key
        for param in result.graph.params
        if any(name.startswith(f"{module}.") for module in joint for name in (param.key, *param.aliases))
    }
    return sum(nbytes for key, nbytes in root_params(result).items() if key in below | shared)
