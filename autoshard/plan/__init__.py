"""The answer as data: schema, fingerprint, strict load, atomic save, diff, JSON Schema. Imports no torch."""

from autoshard.plan.diff import PlanDifference, diff_plans
from autoshard.plan.fingerprint import FingerprintItems, fingerprint
from autoshard.plan.json_schema import plan_json_schema
from autoshard.plan.load import decode_plan, load_plan
from autoshard.plan.save import encode_plan, save_plan
from autoshard.plan.schema import (
    VERSION,
    Alternative,
    Axis,
    Decisions,
    Method,
    Optimal,
    Part,
    PhasePeak,
    Plan,
    Precision,
    Projection,
    Provenance,
    Stretch,
    Unit,
    decisions_of,
)
from autoshard.plan.supported import require_supported

__all__ = [
    "VERSION",
    "Alternative",
    "Axis",
    "Decisions",
    "FingerprintItems",
    "Method",
    "Optimal",
    "Part",
    "PhasePeak",
    "Plan",
    "PlanDifference",
    "Precision",
    "Projection",
    "Provenance",
    "Stretch",
    "Unit",
    "decisions_of",
    "decode_plan",
    "diff_plans",
    "encode_plan",
    "fingerprint",
    "load_plan",
    "plan_json_schema",
    "require_supported",
    "save_plan",
]
