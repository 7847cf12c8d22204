"""The answer as data: schema, fingerprint, strict load, atomic save, diff, JSON Schema. Imports no torch."""

from autoshard.plan.fingerprint import FingerprintItems, fingerprint
from autoshard.plan.schema import (
    VERSION,
    Alternative,
    Axis,
    Decisions,
    Method,
    Optimal,
    Plan,
    Precision,
    Projection,
    Provenance,
    Unit,
)

__all__ = [
    "VERSION",
    "Alternative",
    "Axis",
    "Decisions",
    "FingerprintItems",
    "Method",
    "Optimal",
    "Plan",
    "Precision",
    "Projection",
    "Provenance",
    "Unit",
    "fingerprint",
]
